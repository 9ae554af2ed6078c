"""The deadlines of unfinished requests."""

import heapq
from collections.abc import Iterator

from graftlm.scheduling.request import Request, RequestStatus

__all__ = ["Deadlines"]

_MIN_PRUNE_LEN = 64


class Deadlines:
    """Orders requests by their deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0

    @property
    def next_s(self) -> float | None:
        """Earliest deadline as a clock reading; None without deadlines. It may belong to a finished request."""
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request) -> None:
        """Add a request; a request without a deadline is ignored."""
        if request.deadline_s is not None:
            self._num_added += 1
            heapq.heappush(self._heap, (request.deadline_s, self._num_added, request))

    def expired(self, now: float, num_unfinished: int) -> Iterator[Request]:
        """Remove and yield the unfinished requests whose deadline has passed.

        Args:
            num_unfinished: number of unfinished requests. Entries of finished requests are removed when they outnumber
                the unfinished requests.
        """
        if len(self._heap) > 2 * num_unfinished + _MIN_PRUNE_LEN:
            self._heap = [entry for entry in self._heap if entry[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.status is not RequestStatus.FINISHED:
                yield request
