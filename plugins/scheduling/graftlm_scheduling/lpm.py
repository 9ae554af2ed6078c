"""Longest prefix match first: who finds most of its prompt in the cache goes first.

Admitting by shared prefix length walks the radix tree depth first, the order with the fewest cache misses
(Zheng et al., arXiv:2312.07104, theorem 3.1).
"""

from collections.abc import Sequence

from pydantic import Field

from graftlm.contracts import Options, SchedulingPolicy, WaitingRequest

__all__ = ["LongestPrefixMatch", "LongestPrefixMatchOptions"]


class LongestPrefixMatchOptions(Options):
    """Options of `lpm`."""

    max_wait_s: float = Field(
        default=10.0, gt=0, description="Seconds a request may be passed over before it goes first."
    )
    window: int = Field(
        default=256,
        ge=1,
        description="How many of the oldest requests are compared; the rest follow as they came. "
        "Bounds the work per step: comparing a request may walk the cache.",
    )


class LongestPrefixMatch(SchedulingPolicy):
    """Orders by cached tokens, most first; equal ones as they came."""

    def __init__(self, options: LongestPrefixMatchOptions) -> None:
        self.max_wait_s = options.max_wait_s
        self._window = options.window

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests, most cached tokens first."""
        compared = sorted(waiting[: self._window], key=lambda request: -request.cached_tokens)  # sorted() is stable
        return [*compared, *waiting[self._window :]]
