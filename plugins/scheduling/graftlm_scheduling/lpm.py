"""Orders by longest prefix match: the request with the most cached tokens is first.

Admission by the length of the cached prefix walks the radix tree depth first, which is the order with the fewest cache
misses (Zheng et al., arXiv:2312.07104, theorem 3.1). Requests with the same number of cached tokens, often 0, are also
in depth-first order: the first request of a group computes the prefix that the next requests reuse.
"""

from collections.abc import Sequence

from graftlm.contracts import PrefixGroup, SchedulingPolicy, WaitingRequest
from graftlm_scheduling.depth_first import Rank, depth_first_ranks
from graftlm_scheduling.options import ReorderingOptions

__all__ = ["LongestPrefixMatch"]


class LongestPrefixMatch(SchedulingPolicy):
    """Orders by cached tokens, most first. Ties are ordered group by group, by the first request of each group."""

    def __init__(self, options: ReorderingOptions) -> None:
        self.max_wait_s = options.max_wait_s

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests, most cached tokens first."""
        ranks = depth_first_ranks(waiting, _by_first, _by_arrival)
        cached = [-request.cached_tokens for request in waiting]
        order = sorted(range(len(waiting)), key=lambda idx: (cached[idx], ranks[idx]))
        return [waiting[idx] for idx in order]


def _by_first(group: PrefixGroup, first: int) -> Rank:
    return (first,)


def _by_arrival(request: WaitingRequest, idx: int) -> Rank:
    return (idx,)
