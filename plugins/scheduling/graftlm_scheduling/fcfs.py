"""The policy "first come, first served"."""

from collections.abc import Sequence

from graftlm.contracts import SchedulingPolicy, WaitingRequest

__all__ = ["FirstComeFirstServed"]


class FirstComeFirstServed(SchedulingPolicy):
    """Orders by arrival. No request is passed over."""

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests in the order of their arrival."""
        return list(waiting)
