"""The contract of a drafter, which predicts the next tokens of requests for speculative decoding.

A step verifies drafts: the model computes the drafted tokens together with the latest token. A drafted token is
accepted if it and all drafted tokens before it equal the tokens that are sampled at their positions. A drafter
therefore changes the speed but not the output. It need not import torch.

    request    ... the  cat | sat  on   the  sofa        drafted tokens after the latest token "cat"
    sampled                   sat  on   a                the first two are accepted, and "a" is sampled after them
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graftlm.contracts.draft_head import DraftHead, DraftHeadContext, DraftHeads
from graftlm.contracts.draft_model import DraftModel
from graftlm.contracts.prefix_cache import PrefixKey
from graftlm.errors import ConfigError
from graftlm.records import CacheEvent
from graftlm.types import TokenIds

__all__ = ["Draft", "DraftRequest", "Drafter", "DrafterContext"]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for which tokens are drafted.

    Attributes:
        row: the request's row, which identifies the request from its first draft until `Drafter.close`.
        namespace: the request's namespace. A draft must not depend on tokens of other namespaces.
        token_ids: int32 [n], the prompt and the output so far; a read-only view that is valid during the call. Ids
            below 0 stand for features of pictures.
        limit: maximum length of the draft in tokens, at least 1.
    """

    row: int
    namespace: str
    token_ids: TokenIds
    limit: int


@dataclass(frozen=True, slots=True)
class Draft:
    """The predicted next tokens of a request.

    Attributes:
        token_ids: int32 [m], at least one.
        confidence: estimated probability, from 0 to 1, that a drafted token is accepted if all tokens before it are.
            The core corrects the estimate with the measured acceptance, so only the order of confidences matters.
    """

    token_ids: TokenIds
    confidence: float


def _no_draft_models(path: str, kv_tokens: int) -> DraftModel:
    raise ConfigError(f"draft model {path!r}: draft models cannot be loaded here")


def _no_draft_heads(make: Callable[[DraftHeadContext], DraftHead], path: str | None) -> DraftHeads:
    raise ConfigError(f"draft head {path!r}: draft heads cannot be loaded here")


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The arguments of a drafter's `create`.

    Attributes:
        continuation: function that returns the tokens that follow a key in the prefix cache, up to a given number,
            int32; see `PrefixCache.continuation`. It may be called only after the engine has started.
        vocab_size: V; drafted token ids must be below V.
        load_model: function that loads a checkpoint as a draft model on the engine's device. Its arguments are the
            checkpoint's path and the maximum number of tokens in the KV memory. It raises ConfigError if the vocabulary
            differs from the served model's or the memory is too large, and ModelError if the checkpoint cannot be used.
            The messages contain the options `path` and `kv_tokens` of `DraftModelOptions`.
        load_head: function that creates a draft head for the served model and loads its weights. Its arguments are a
            function that creates the head, and the path of the head's checkpoint; None: the served model's checkpoint.
            An engine has at most one head. The result may be used only after the engine has started. It raises
            ConfigError if the head cannot be used.
    """

    continuation: Callable[[PrefixKey, int], TokenIds]
    vocab_size: int
    load_model: Callable[[str, int], DraftModel] = _no_draft_models
    load_head: Callable[[Callable[[DraftHeadContext], DraftHead], str | None], DraftHeads] = _no_draft_heads


class Drafter(ABC):
    """Predicts the next tokens of requests. Only one thread calls it.

    Invariants, each checked by `graftlm.testing.DrafterConformance`:
        - `propose` returns one entry per request, in the order of the requests.
        - A draft has 1 to `limit` tokens with ids from 0 to V - 1, and a confidence from 0 to 1.
        - `propose` does not change `token_ids`, and does not read them after the call.
        - A draft depends only on tokens of the request's namespace.
        - Tokens that an event has removed from the prefix cache are not drafted from the cache any more.
        - After `close`, a row may belong to a new request, whose drafts do not depend on the previous request.

    If `propose` raises or breaks an invariant, the request continues without this drafter. If `cache_event` raises, the
    drafter is not called again.
    """

    @property
    def is_expensive(self) -> bool:
        """Whether `propose` takes much of a step's time. The core then calls it only while drafts save time."""
        return False

    @property
    def drafts_ahead(self) -> bool:
        """Whether `propose` may be called while a step is in flight.

        If False, `propose` is called only when the values of all tokens are known and their hidden states computed. The
        core then expects that the next draft has the confidence of the request's previous draft.
        """
        return True

    @property
    def num_page_tokens(self) -> int:
        """Number of tokens after a request's latest token for which the core allocates slots before `propose`."""
        return 0

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft | None]:
        """Return a draft for each request, or None for a request without a prediction."""

    def close(self, row: int) -> None:
        """Delete the state of a request that has left its row."""

    def cache_event(self, event: CacheEvent) -> None:
        """Process a change of the prefix cache. Called for every change, in order, if a drafter overrides this method.

        A drafter that stores cached tokens must store them by namespace, and delete them when they are removed.
        """
