"""Longest prefix match first: who finds most of its prompt in the cache goes first.

Admitting by shared prefix length walks the radix tree depth first, the order with the fewest cache misses
(Zheng et al., arXiv:2312.07104, theorem 3.1). Requests that find equally much, often nothing, are walked depth first
too: the first of a group computes what its siblings, right behind it, reuse.
"""

from collections.abc import Sequence

from graftlm.contracts import PrefixGroup, SchedulingPolicy, WaitingRequest
from graftlm_scheduling.depth_first import Rank, ranks_on_the_way
from graftlm_scheduling.options import ReorderingOptions

__all__ = ["LongestPrefixMatch"]


class LongestPrefixMatch(SchedulingPolicy):
    """Orders by cached tokens, most first; equal ones group by group, as the first of each group came."""

    def __init__(self, options: ReorderingOptions) -> None:
        self.max_wait_s = options.max_wait_s

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests, most cached tokens first."""
        ranks = ranks_on_the_way(waiting, _by_first, _by_arrival)
        cached = [-request.cached_tokens for request in waiting]
        order = sorted(range(len(waiting)), key=lambda idx: (cached[idx], ranks[idx]))
        return [waiting[idx] for idx in order]


def _by_first(group: PrefixGroup, first: int) -> Rank:
    return (first,)


def _by_arrival(request: WaitingRequest, idx: int) -> Rank:
    return (idx,)
