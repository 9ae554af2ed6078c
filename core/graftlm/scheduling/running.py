"""The requests that hold a row, most important first."""

import numpy as np
from numpy.typing import NDArray

from graftlm.memory import KVManager
from graftlm.scheduling.request import Request, RequestStatus

__all__ = ["RunningRequests"]


class RunningRequests:
    """Lets requests in and out of the rows of the request table.

    Attributes:
        requests: highest priority first, then earliest arrival; the last one is the first to be retracted.
        rows: int32, their rows in the same order.
    """

    def __init__(self, kv: KVManager) -> None:
        self.requests: list[Request] = []
        self.rows: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._kv = kv
        self._by_row: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def at(self, rows: NDArray[np.int32]) -> tuple[Request, ...]:
        """Return the requests that hold some rows."""
        by_row = self._by_row
        return tuple([by_row[row] for row in rows.tolist()])

    def enter(self, request: Request, reserved_pages: int) -> int | None:
        """Give a waiting request a row and what the cache has of it.

        Args:
            reserved_pages: must stay available for others.

        Returns: tokens found in the cache; None, with nothing changed, when the pages it lacks are not there. The
            caller knows that a row is free.
        """
        kv = self._kv
        row = kv.table.take_row(request.num_tokens, request.max_len)
        matched = kv.attach(row, request.reusable_key())
        lacking = kv.pages_for(request.num_tokens) - int(kv.table.num_pages[row])
        if lacking + reserved_pages > kv.available_pages:
            kv.discard(row)
            return None
        request.status, request.row = RequestStatus.RUNNING, row
        self._by_row[row] = request
        self.requests.append(request)
        self._reorder()
        return matched

    def release(self, request: Request) -> None:
        """Take a request out of its row; what it has computed stays cached."""
        row = self._leave(request)
        num_valid = min(int(self._kv.table.computed[row]), request.num_tokens)
        self._kv.release(row, request.key(num_valid))

    def discard(self, request: Request) -> None:
        """Take a request out of its row; what it has computed is not trusted and not cached."""
        self._kv.discard(self._leave(request))

    def clear(self) -> None:
        """Forget every request, when the memory behind the rows starts anew."""
        self.requests.clear()
        self._by_row.clear()
        self._reorder()

    def _leave(self, request: Request) -> int:
        row = request.held_row
        request.row = None
        del self._by_row[row]
        self.requests.remove(request)
        self._reorder()
        return row

    def _reorder(self) -> None:
        self.requests.sort(key=lambda r: (-r.priority, r.arrival_s))
        self.rows = np.array([r.held_row for r in self.requests], dtype=np.int32)
