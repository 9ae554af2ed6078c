"""Orders by request priority, with preemption."""

from collections.abc import Sequence

from graftlm.contracts import Preemption, SchedulingPolicy, WaitingRequest
from graftlm_scheduling.options import PreemptivePriorityOptions

__all__ = ["PreemptivePriority"]


class PreemptivePriority(SchedulingPolicy):
    """Orders by arrival within a priority. A request of higher priority can replace a running request."""

    def __init__(self, options: PreemptivePriorityOptions) -> None:
        self.preemption = Preemption(options.min_difference) if options.preempt else None

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests in the order of their arrival; the core then sorts them by priority."""
        return list(waiting)
