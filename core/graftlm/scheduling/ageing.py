"""Finds aged requests: waiting requests that the policy has passed over for too long."""

import heapq
import itertools
from collections.abc import Collection

from graftlm.scheduling.request import Request

__all__ = ["Ageing"]


class Ageing:
    """Records when each waiting request is first passed over, and returns the requests that have aged since.

    A request is passed over when a later request of the same or a lower priority is admitted before it. A later request
    of higher priority does not count. The recorded time remains if the request is admitted and retracted.

        arrives          passed over          aged: admitted first; aged requests in order of arrival
        |----------------|-------------------|------------------------------>
                         |<- max_wait_s    ->|

    Costs: one heap insertion for each request that is passed over; a step has no cost per waiting request.
    """

    def __init__(self) -> None:
        self.num_aged = 0
        self._fresh: dict[int, dict[str, Request]] = {}  # priority -> requests not passed over, in order of arrival
        self._passed: list[tuple[float, int, Request]] = []  # a heap; may contain requests that no longer wait
        self._waiting_passed: dict[str, int] = {}  # id of a waiting request -> ticket of its valid heap entry
        self._aged: dict[str, Request] = {}
        self._tickets = itertools.count()

    def add(self, request: Request) -> None:
        """Add a waiting request."""
        if request.is_aged:
            self._aged[request.request_id] = request
        elif request.passed_over_s is not None:
            self._push(request, request.passed_over_s)
        else:
            self._add_fresh(request)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        request_id = request.request_id
        fresh = self._fresh.get(request.priority, {})
        if fresh.pop(request_id, None) is not None and not fresh:
            del self._fresh[request.priority]
        self._waiting_passed.pop(request_id, None)
        self._aged.pop(request_id, None)

    def admitted(self, request: Request, now: float) -> None:
        """Record the requests that an admitted request has passed over."""
        for priority in [priority for priority in self._fresh if priority >= request.priority]:
            fresh = self._fresh[priority]
            passed = list(itertools.takewhile(lambda other: other.seniority < request.seniority, fresh.values()))
            for other in passed:
                other.passed_over_s = now
                del fresh[other.request_id]
                self._push(other, now)
            if not fresh:
                del self._fresh[priority]

    def aged(self, limit_s: float, now: float) -> Collection[str]:
        """Return the ids of the requests that were passed over `limit_s` seconds ago or earlier."""
        while self._passed and now - self._passed[0][0] >= limit_s:
            _, ticket, request = heapq.heappop(self._passed)
            if self._waiting_passed.get(request.request_id) == ticket:
                del self._waiting_passed[request.request_id]
                request.is_aged = True
                self._aged[request.request_id] = request
                self.num_aged += 1
        return self._aged.keys()

    def _add_fresh(self, request: Request) -> None:
        fresh = self._fresh.setdefault(request.priority, {})
        last = next(reversed(fresh.values()), None)
        fresh[request.request_id] = request
        if last is not None and last.seniority > request.seniority:
            self._fresh[request.priority] = dict(sorted(fresh.items(), key=lambda item: item[1].seniority))

    def _push(self, request: Request, since_s: float) -> None:
        ticket = next(self._tickets)
        self._waiting_passed[request.request_id] = ticket
        heapq.heappush(self._passed, (since_s, ticket, request))
