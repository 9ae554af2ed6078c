"""Depth first by weight: the branch of the tree on which most requests wait goes first."""

from collections.abc import Sequence

from graftlm.contracts import PrefixGroup, SchedulingPolicy, WaitingRequest
from graftlm_scheduling.depth_first import Rank, ranks_on_the_way
from graftlm_scheduling.options import ReorderingOptions

__all__ = ["DepthFirstByWeight"]


class DepthFirstByWeight(SchedulingPolicy):
    """Walks the radix tree of waiting requests depth first, at each fork the heaviest branch first.

    A branch weighs as many requests as wait on it. Branches of which the cache holds something go before those of which
    it holds nothing: without that, two branches of like weight would take turns, as each request that leaves makes its
    branch lighter. Branches of equal weight go as their first requests came.
    """

    def __init__(self, options: ReorderingOptions) -> None:
        self.max_wait_s = options.max_wait_s

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests, those of the heaviest branch first."""

        def rank_group(group: PrefixGroup, first: int) -> Rank:
            return (_is_cold(waiting[first], group.parent), -group.num_waiting, first)

        def rank_request(request: WaitingRequest, idx: int) -> Rank:
            return (_is_cold(request, request.group), -1, idx)

        ranks = ranks_on_the_way(waiting, rank_group, rank_request)
        return [waiting[idx] for idx in sorted(range(len(waiting)), key=ranks.__getitem__)]


def _is_cold(request: WaitingRequest, around: PrefixGroup | None) -> bool:
    """Whether the cache holds nothing of a request past what all of a group share."""
    return request.cached_tokens <= (0 if around is None else around.num_tokens)
