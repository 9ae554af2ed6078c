"""Orders by longest output first: the request that may generate the most tokens is first.

If long outputs start last, they run alone at the end, in small batches. If they start first, they overlap with the
other outputs. This is the rule "longest processing time first" (Graham, "Bounds on multiprocessing timing anomalies",
1969), whose makespan is at most 4/3 of the optimum.
"""

from collections.abc import Sequence

from graftlm.contracts import SchedulingPolicy, WaitingRequest
from graftlm_scheduling.options import ReorderingOptions

__all__ = ["LongestOutputFirst"]


class LongestOutputFirst(SchedulingPolicy):
    """Orders by the number of tokens that a request may still generate, most first. Ties are in order of arrival."""

    def __init__(self, options: ReorderingOptions) -> None:
        self.max_wait_s = options.max_wait_s

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests, longest output first."""
        return sorted(waiting, key=lambda request: -request.max_new_tokens)  # sorted() is stable
