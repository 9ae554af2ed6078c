"""The prefetches from storage to host memory for waiting requests."""

from graftlm.memory import KVManager
from graftlm.scheduling.request import Request, RequestStatus

__all__ = ["Prefetches"]


class Prefetches:
    """Holds a prefetch ticket for each waiting request that has one, until the request is admitted or ends."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._requests: dict[str, Request] = {}
        self._blocked: list[Request] = []  # not admitted yet because of their prefetch, as of the latest plan

    @property
    def next_deadline_s(self) -> float | None:
        """The clock reading at which the first blocked request stops waiting for its prefetch; None if none does."""
        tickets = [request.prefetch for request in self._blocked]
        return min((t.deadline_s for t in tickets if t is not None and t.deadline_s is not None), default=None)

    def begin(self, request: Request) -> None:
        """Begin to prefetch what storage holds of a request's prompt, where there are lower tiers."""
        if self._kv.tiers is None:
            return
        request.prefetch = self._kv.tiers.cache.prefetch(request.reusable_key())
        if request.prefetch is not None:
            self._requests[request.request_id] = request

    def begin_plan(self, now: float) -> None:
        """Record which requests their prefetch keeps from admission now."""
        self._blocked = [request for request in self._requests.values() if request.awaits_prefetch(now)]

    def release(self) -> None:
        """Release the tickets of requests that no longer wait."""
        if not self._requests:
            return
        for request_id, request in list(self._requests.items()):
            if request.status is RequestStatus.WAITING:
                continue
            del self._requests[request_id]
            ticket, request.prefetch = request.prefetch, None
            if ticket is not None and self._kv.tiers is not None:
                self._kv.tiers.cache.release(ticket)

    def forget(self) -> None:
        """Drop every ticket without releasing it, because its cache is replaced."""
        for request in self._requests.values():
            request.prefetch = None
        self._requests.clear()
        self._blocked.clear()
