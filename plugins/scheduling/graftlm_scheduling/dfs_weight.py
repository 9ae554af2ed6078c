"""Orders depth first by weight: the branch of the tree with the most waiting requests is first."""

from collections.abc import Sequence

from graftlm.contracts import PrefixGroup, SchedulingPolicy, WaitingRequest
from graftlm_scheduling.depth_first import Rank, depth_first_ranks
from graftlm_scheduling.options import ReorderingOptions

__all__ = ["DepthFirstByWeight"]


class DepthFirstByWeight(SchedulingPolicy):
    """Walks the radix tree of waiting requests depth first, with the heaviest branch of each fork first.

    The weight of a branch is its number of waiting requests. Branches that are partly cached come before branches that
    are not cached. Without this rule, two branches of similar weight would alternate, because each admitted request
    makes its branch lighter. Branches of equal weight are in the order in which their first requests arrived.
    """

    def __init__(self, options: ReorderingOptions) -> None:
        self.max_wait_s = options.max_wait_s

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests, heaviest branch first."""

        def rank_group(group: PrefixGroup, first: int) -> Rank:
            return (_is_cold(waiting[first], group.parent), -group.num_waiting, first)

        def rank_request(request: WaitingRequest, idx: int) -> Rank:
            return (_is_cold(request, request.group), -1, idx)

        ranks = depth_first_ranks(waiting, rank_group, rank_request)
        return [waiting[idx] for idx in sorted(range(len(waiting)), key=ranks.__getitem__)]


def _is_cold(request: WaitingRequest, around: PrefixGroup | None) -> bool:
    """Return whether no token of a request is cached after the prefix that its group `around` shares."""
    return request.cached_tokens <= (0 if around is None else around.num_tokens)
