"""Drafts from the prefix cache: the tokens that follow the request's tokens in the radix tree.

A finished request leaves its output in the cache. A request with the same prompt and the same output so far is at a
place in the tree whose children continue this output. Examples are a regenerated answer, a retry, an agent that
replays its steps, and a fork with the same output.
"""

from collections.abc import Callable, Sequence
from typing import Final

from graftlm.contracts import Draft, Drafter, DraftRequest, PrefixKey
from graftlm.types import TokenIds

__all__ = ["RadixDrafter"]

_CONFIDENCE: Final = 0.9


class RadixDrafter(Drafter):
    """Looks up each request's tokens in the prefix cache; has no state.

    Args:
        continuation: see `DrafterContext`.
    """

    def __init__(self, continuation: Callable[[PrefixKey, int], TokenIds]) -> None:
        self._continuation = continuation

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Return the tokens that follow each request's tokens in the cache."""
        drafts: list[Draft | None] = []
        for request in requests:
            found = self._continuation(PrefixKey(request.token_ids, request.namespace), request.limit)
            drafts.append(Draft(found, _CONFIDENCE) if len(found) else None)
        return drafts
