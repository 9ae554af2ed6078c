"""The contract of a drafter, which predicts the next tokens of requests for speculative decoding.

A step verifies drafts: the model computes the drafted tokens together with the latest token. Drafted tokens are
accepted up to the first one that differs from the token that is sampled at its position. A drafter therefore changes
the speed and never the output. It needs no torch.

    request    ... the  cat | sat  on   the  sofa        drafted tokens after the latest token "cat"
    sampled                   sat  on   a                the first two are accepted, and "a" is sampled after them
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graftlm.contracts.draft_model import DraftModel
from graftlm.contracts.prefix_cache import PrefixKey
from graftlm.errors import ConfigError
from graftlm.types import TokenIds

__all__ = ["Draft", "DraftRequest", "Drafter", "DrafterContext"]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for which tokens are drafted.

    Attributes:
        row: identifies the request from its first draft until `Drafter.close`.
        namespace: namespace of the request's prefixes in the cache. A draft must not depend on tokens of other
            namespaces.
        token_ids: int32 [n], the prompt and the output so far; a read-only view, valid during the call.
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
        confidence: estimated probability, from 0 to 1, that a drafted token is accepted if the tokens before it are.
            The core calibrates confidences with the accepted tokens, so only their order matters.
    """

    token_ids: TokenIds
    confidence: float


def _no_draft_models(path: str, kv_tokens: int) -> DraftModel:
    raise ConfigError(f"draft model {path!r}: draft models cannot be loaded here")


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The arguments of a drafter's `create`.

    Attributes:
        continuation: function that returns up to a given number of tokens that follow a key in the prefix cache, int32;
            see `PrefixCache.continuation`. It can be called once the engine has started.
        vocab_size: V; drafted ids are below it.
        load_model: function that loads the checkpoint at a path as a draft model on the engine's device, with a KV
            memory of up to a given number of tokens. It raises ConfigError if the vocabulary differs from the served
            model's or the memory is too large, and ModelError if the checkpoint cannot be used. The messages name the
            options `path` and `kv_tokens` of `DraftModelOptions`.
    """

    continuation: Callable[[PrefixKey, int], TokenIds]
    vocab_size: int
    load_model: Callable[[str, int], DraftModel] = _no_draft_models


class Drafter(ABC):
    """Predicts the next tokens of requests; called by one thread.

    Invariants, each checked by `graftlm.testing.DrafterConformance`:
        - `propose` returns one entry per request, in their order.
        - A draft has at least one token and at most `limit`, all from 0 to V - 1, and a confidence from 0 to 1.
        - `token_ids` are only read, and not after the call.
        - A draft depends only on tokens of the request's namespace.
        - After `close`, a row may belong to another request, and drafts for it do not depend on the earlier one.

    If `propose` raises or breaks an invariant, the request continues without this drafter.
    """

    @property
    def is_expensive(self) -> bool:
        """Whether `propose` takes a considerable part of a step's time. The core then calls it only while this pays."""
        return False

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft | None]:
        """Return a draft for each request; None where the drafter has no prediction."""

    def close(self, row: int) -> None:
        """Delete the state of a request that has left its row."""
