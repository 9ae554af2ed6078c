"""The waiting requests and the order in which they are considered."""

import logging
from collections.abc import Callable, Iterator
from typing import cast

from graftlm.contracts import SchedulingPolicy
from graftlm.scheduling.request import Request

__all__ = ["QueueEntry", "WaitingQueue"]

logger = logging.getLogger(__name__)


class QueueEntry:
    """A waiting request as a policy sees it: `graftlm.contracts.WaitingRequest`."""

    __slots__ = ("_cached_tokens", "_memo_version", "_queue", "is_aged", "passed_over_since_s", "request")

    def __init__(self, request: Request, queue: "WaitingQueue") -> None:
        self.request = request
        self.passed_over_since_s: float | None = None
        self.is_aged = False
        self._queue = queue
        self._memo_version: int | None = None
        self._cached_tokens = 0

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def arrival_s(self) -> float:
        """Clock reading when it arrived."""
        return self.request.arrival_s

    @property
    def priority(self) -> int:
        """Higher is more important."""
        return self.request.priority

    @property
    def num_tokens(self) -> int:
        """Tokens it must have in the cache before it samples."""
        return self.request.num_tokens

    @property
    def max_new_tokens(self) -> int:
        """Tokens it may still generate."""
        return self.request.max_len - self.request.num_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of it that the cache holds; looked up again only when the cache has changed."""
        version = self._queue.cache_version()
        if version != self._memo_version:
            self._cached_tokens = self._queue.probe(self.request)
            self._memo_version = version
        return self._cached_tokens


class WaitingQueue:
    """Waiting requests in order of arrival.

    Order of consideration: request priority; within a priority, requests that were passed over for the policy's
    `max_wait_s` (ageing); then the policy's order. A request is passed over when a later arrival of no higher priority
    is admitted in front of it.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        probe: Callable[[Request], int],
        cache_version: Callable[[], int],
    ) -> None:
        self.probe = probe
        self.cache_version = cache_version
        self.num_aged = 0  # requests that ageing put first, so far
        self._policy = policy
        self._entries: dict[str, QueueEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in self._entries.values())

    def add(self, request: Request) -> None:
        """Append a request, or put a retracted one back to the place of its arrival."""
        last = next(reversed(self._entries.values()), None)
        self._entries[request.request_id] = QueueEntry(request, self)
        if last is not None and last.arrival_s > request.arrival_s:
            self._entries = dict(sorted(self._entries.items(), key=lambda item: item[1].arrival_s))

    def remove(self, request: Request) -> None:
        """Take a request out."""
        del self._entries[request.request_id]

    def discard(self, request: Request) -> None:
        """Take a request out if it is there."""
        self._entries.pop(request.request_id, None)

    def ordered(self, now: float) -> list[Request]:
        """Return the requests, first to admit first."""
        waiting = list(self._entries.values())
        if len(waiting) <= 1:
            return [entry.request for entry in waiting]
        order = self._policy_order(waiting, now)
        order.sort(key=lambda e: -e.priority)
        return [entry.request for entry in order]

    def admit(self, request: Request, now: float) -> None:
        """Take out an admitted request, and note whom it went in front of."""
        admitted = self._entries[request.request_id]
        for entry in self._entries.values():
            if entry is admitted:
                break
            if entry.passed_over_since_s is None and entry.priority >= admitted.priority:
                entry.passed_over_since_s = now
        del self._entries[request.request_id]

    def _policy_order(self, waiting: list[QueueEntry], now: float) -> list[QueueEntry]:
        """Ask the policy; one that raises or loses requests costs its order, not the requests."""
        try:
            order = list(cast(list[QueueEntry], self._policy.order(waiting, now)))
            aged = [entry for entry in waiting if self._is_aged(entry, now)]
            if aged:
                order = aged + [entry for entry in order if not entry.is_aged]
            if set(map(id, order)) == set(map(id, waiting)) and len(order) == len(waiting):
                return order
            logger.error("scheduling policy %s did not return a permutation; using arrival order", type(self._policy))
        except Exception:
            logger.exception("scheduling policy %s failed; using arrival order", type(self._policy))
        return list(waiting)

    def _is_aged(self, entry: QueueEntry, now: float) -> bool:
        limit, since = self._policy.max_wait_s, entry.passed_over_since_s
        if not entry.is_aged and limit is not None and since is not None and now - since >= limit:
            entry.is_aged = True
            self.num_aged += 1
        return entry.is_aged
