"""The prefetches of KV blocks from storage to host memory for waiting requests."""

from graftlm.memory import KVManager
from graftlm.scheduling.request import Request, RequestStatus

__all__ = ["Prefetches"]


class Prefetches:
    """Stores the prefetch tickets of waiting requests until they are admitted or end."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._requests: dict[str, Request] = {}
        self._blocked: list[Request] = []  # requests that the latest plan did not admit because of their prefetch

    @property
    def next_deadline_s(self) -> float | None:
        """Clock reading at which the first blocked request stops waiting for its prefetch; None without a limit."""
        tickets = [request.prefetch for request in self._blocked]
        return min((t.deadline_s for t in tickets if t is not None and t.deadline_s is not None), default=None)

    def begin(self, request: Request) -> None:
        """Begin to prefetch the blocks of a request's prompt that are in storage, if the cache has lower tiers."""
        if self._kv.tiers is None:
            return
        request.prefetch = self._kv.tiers.cache.prefetch(request.reusable_key())
        if request.prefetch is not None:
            self._requests[request.request_id] = request

    def begin_plan(self, now: float) -> None:
        """Record the requests that cannot be admitted now because of their prefetch."""
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
        """Drop all tickets without releasing them, because the cache is replaced."""
        for request in self._requests.values():
            request.prefetch = None
        self._requests.clear()
        self._blocked.clear()
