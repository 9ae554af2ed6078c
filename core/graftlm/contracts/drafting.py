"""The contract of a drafter, which predicts the next tokens of requests for speculative decoding.

A step verifies drafts: the model computes them together with the latest token, and each is kept while it equals the
token that is sampled at its position. A drafter therefore changes the speed and never the output. It needs no torch.

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
    """A request that tokens are drafted for.

    Attributes:
        row: identifies the request from its first draft until `Drafter.close`.
        namespace: of its prefixes in the cache. A draft must not depend on tokens of other namespaces.
        token_ids: int32 [n], its prompt and its output so far; a read-only view, valid during the call.
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
        confidence: the drafter's estimate, from 0 to 1, of the probability that a token is right if those before it
            are. The core compares it with what was accepted, so it need only order drafts.
    """

    token_ids: TokenIds
    confidence: float


def _no_draft_models(path: str, kv_tokens: int) -> DraftModel:
    raise ConfigError(f"draft model {path!r}: draft models cannot be loaded here")


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The arguments of a drafter's `create`.

    Attributes:
        continuation: returns up to that many tokens that follow a key in the prefix cache, int32; see
            `PrefixCache.continuation`. It can be called once the engine has started.
        vocab_size: V; drafted ids are below it.
        load_model: loads the checkpoint of a draft model, with a KV memory of up to that many tokens, on the engine's
            device. It raises ConfigError if the vocabulary is another one than the served model's, or if the memory is
            too large, and ModelError if the checkpoint cannot be used. The messages name the options `path` and
            `kv_tokens`.
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
        - A draft depends on tokens of the request's own namespace only.
        - After `close`, a row may belong to another request, and drafts for it do not depend on the earlier one.

    If `propose` raises or returns something else, the request goes on without this drafter.
    """

    @property
    def is_expensive(self) -> bool:
        """Whether `propose` takes a considerable part of a step's time; the core then asks only while that pays."""
        return False

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft | None]:
        """Return a draft for each request; None where the drafter has no prediction."""

    def close(self, row: int) -> None:
        """Forget a request that has left its row."""
