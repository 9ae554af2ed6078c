"""The requests that have a row, most important first."""

from bisect import insort
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from graftlm.memory import KVManager, Reuse
from graftlm.scheduling.request import Request, RequestStatus

__all__ = ["RunningRequests"]


class RunningRequests:
    """Assigns rows of the request table to requests, and frees the rows.

    Args:
        on_leave: function that is called with each row that a request leaves.

    Attributes:
        requests: the running requests, highest priority first, then earliest arrival. The last request is retracted
            first.
    """

    def __init__(self, kv: KVManager, on_leave: Callable[[int], None] | None = None) -> None:
        self.requests: list[Request] = []
        self._rows: NDArray[np.int32] | None = None  # None: to be rebuilt on the next access
        self._all: tuple[Request, ...] = ()  # copy of `requests`; valid while `_rows` is set
        self._kv = kv
        self._by_row: dict[int, Request] = {}
        self._on_leave = on_leave

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def rows(self) -> NDArray[np.int32]:
        """The rows in the order of `requests`, int32, read-only; the same array until a request enters or leaves."""
        if self._rows is None:
            self._all = tuple(self.requests)
            self._rows = np.array([request.held_row for request in self.requests], dtype=np.int32)
        return self._rows

    def at(self, rows: NDArray[np.int32]) -> tuple[Request, ...]:
        """Return the requests of some rows."""
        if rows is self._rows:
            return self._all
        by_row = self._by_row
        return tuple([by_row[row] for row in rows.tolist()])

    def enter(self, request: Request, reserved_pages: int) -> Reuse | None:
        """Assign a free row to a waiting request, and attach the request's cached prefix. A row must be free.

        Args:
            reserved_pages: number of pages that must stay available for other rows.

        Returns: the numbers of reused tokens; None if there are too few pages, and then nothing is changed.
        """
        kv = self._kv
        at_best = kv.cache.probe(request.reusable_key())  # a probe first, because the cache counts a match as a hit
        lacking = kv.pages_for(request.num_tokens) - at_best
        if lacking + reserved_pages > kv.available_pages or not kv.has_window_room(lacking, len(self.requests)):
            return None
        row = kv.table.take_row(request.num_tokens, request.max_len, request.adapter_slot)
        matched = kv.attach(row, request.reusable_key())
        lacking = kv.pages_for(request.num_tokens) - int(kv.table.num_pages[row])
        if lacking + reserved_pages > kv.available_pages or not kv.has_window_room(lacking, len(self.requests)):
            kv.discard(row)
            return None
        kv.table.constrained[row] = request.grammar is not None
        if request.media is not None:
            kv.table.shift_rope(row, request.media.rope_offset)
        request.status, request.row = RequestStatus.RUNNING, row
        self._by_row[row] = request
        insort(self.requests, request, key=_rank)
        self._rows = None
        return matched

    def release(self, request: Request) -> None:
        """Remove a request from its row; its keys and values stay cached."""
        row = self._leave(request)
        num_valid = min(int(self._kv.table.computed[row]), request.num_tokens)
        self._kv.release(row, request.key(num_valid))

    def discard(self, request: Request) -> None:
        """Remove a request from its row; its keys and values are not cached, because they may be wrong."""
        self._kv.discard(self._leave(request))

    def clear(self) -> None:
        """Remove all requests from their rows. The KV memory is not changed, because it is emptied afterwards."""
        for row, request in self._by_row.items():
            request.row = None
            if self._on_leave is not None:
                self._on_leave(row)
        self.requests.clear()
        self._by_row.clear()
        self._rows = None

    def _leave(self, request: Request) -> int:
        row = request.held_row
        request.row = None
        del self._by_row[row]
        self.requests.remove(request)
        self._rows = None
        if self._on_leave is not None:
            self._on_leave(row)
        return row


def _rank(request: Request) -> tuple[int, tuple[float, int]]:
    """Return a sort key: highest priority first, then earliest arrival."""
    return -request.priority, request.seniority
