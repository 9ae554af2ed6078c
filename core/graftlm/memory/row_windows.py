"""Tracks the window pages that running rows need: the rows' own pages, and pages that rows lock in the cache."""

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import PrefixCache, PrefixHandle
from graftlm.memory.request_table import RequestTable
from graftlm.memory.window_pages import WindowPages
from graftlm.types import PageIds

__all__ = ["RowWindows"]


class RowWindows:
    """Tracks the window of each row, and releases the window pages before it.

        page table     |cached..|cached..|cached..|cached..|own.....|own.....|own..   |
        at admission            |<-  locked in the cache ->|                             the next token's window
        later                            |<-   locked    ->|<-kept->|
        at the end                                         |   -    |<-     kept    ->|

    The row's lock in the cache is shortened each time the window has moved by `stride_pages`.

    For each row, a step reads the window before the row's first token, and writes up to the row's last token. Another
    row of the same step must not reuse these window pages, so `protect_step` locks them until the step is planned.
    Later steps may reuse them, because steps run in the order in which they are planned.

    Attributes:
        page_table: int32 [R, P], the window pages of the request table's pages; entries outside the window are valid
            ids without meaning.
    """

    def __init__(self, pages: WindowPages, table: RequestTable) -> None:
        self.pages = pages
        self.page_table = np.zeros_like(table.page_table)
        self._table = table
        self._passed = np.zeros(table.num_rows, dtype=np.int64)  # number of leading pages before the window
        self._locks: list[tuple[PrefixHandle, int] | None] = [None] * table.num_rows
        self._lock_len = np.zeros(table.num_rows, dtype=np.int64)  # number of pages of each lock, 0 without lock
        self._step_locks: list[tuple[PrefixHandle, int]] = []

    def lock(self, row: int, cache: PrefixCache, handle: PrefixHandle) -> None:
        """Lock the window before a locked handle for a row, and release the row's previous window lock."""
        self._lock(row, cache, handle, min(self.pages.reach_pages, handle.num_pages))

    def _lock(self, row: int, cache: PrefixCache, handle: PrefixHandle, length: int) -> None:
        old = self._locks[row]
        cache.lock_window(handle, length)
        self._locks[row] = (handle, length)
        self._lock_len[row] = length
        if old is not None:
            cache.unlock_window(*old)

    def unlock(self, row: int, cache: PrefixCache) -> None:
        """Release a row's window lock in the cache. The row's handle must still be locked."""
        lock = self._locks[row]
        if lock is not None:
            cache.unlock_window(*lock)
        self._locks[row] = None
        self._lock_len[row] = 0

    def look_up(self, row: int, start: int, end: int) -> None:
        """Write window pages to the page table: of the row's pages `start` to `end`, as far as the window reaches."""
        start = max(start, end - self.pages.reach_pages)
        self.page_table[row, start:end] = self.pages.readable(self._table.page_table[row, start:end])

    def drop_row(self, row: int, cache: PrefixCache) -> None:
        """Release a row's window lock and reset its state."""
        self.unlock(row, cache)
        self._passed[row] = 0

    def protect_step(self, cache: PrefixCache, start: int, handle: PrefixHandle) -> None:
        """Lock the window pages that a step reads and writes for a cached chunk, until `settle` is called.

        Args:
            start: number of the row's pages that were cached before the chunk.
            handle: handle of the chunk's end.
        """
        length = min(handle.num_pages - start + self.pages.reach_pages, handle.num_pages)
        cache.lock(handle)
        cache.lock_window(handle, length)
        self._step_locks.append((handle, length))

    def settle(self, cache: PrefixCache) -> None:
        """Unlock the window pages that `protect_step` locked."""
        for handle, length in self._step_locks:
            cache.unlock_window(handle, length)
            cache.unlock(handle)
        self._step_locks.clear()
        table = self._table
        passed = self.pages.span.num_passed(table.computed)
        moved = np.flatnonzero(passed > self._passed)
        if len(moved):
            self._free_passed(moved, passed)
            self._passed[moved] = passed[moved]
            self._shorten_locks(moved, cache)

    def clear(self) -> None:
        """Reset all rows without unlocking, because the cache that contained their locks was replaced."""
        self.pages.clear()
        self._passed[:] = 0
        self._locks = [None] * self._table.num_rows
        self._lock_len[:] = 0
        self._step_locks.clear()

    def kept(self, row: int) -> PageIds:
        """Return the ids of the row's own pages that are not before its window, as a copy, for checks."""
        table = self._table
        first = max(int(table.cached_pages[row]), int(self._passed[row]))
        return table.page_table[row, first : table.num_pages[row]].copy()

    def _shorten_locks(self, rows: NDArray[np.int64], cache: PrefixCache) -> None:
        """Shorten the locks of rows whose window has moved by at least `stride_pages`."""
        needed = np.maximum(self._table.cached_pages[rows] - self._passed[rows], 0)
        surplus = self._lock_len[rows] - needed
        worth_it = (surplus >= self.pages.span.stride_pages) | ((surplus > 0) & (needed == 0))
        for row, length in zip(rows[worth_it].tolist(), needed[worth_it].tolist(), strict=True):
            lock = self._locks[row]
            if lock is not None:
                self._lock(row, cache, lock[0], length)

    def _free_passed(self, rows: NDArray[np.int64], passed: NDArray[np.int64]) -> None:
        """Free the window pages of the rows' own pages before `passed`; the cache owns those of cached pages."""
        first = np.maximum(self._passed[rows], self._table.cached_pages[rows])
        counts = np.maximum(passed[rows] - first, 0)
        total = int(counts.sum())
        if total:
            column = np.arange(total) + np.repeat(first - (np.cumsum(counts) - counts), counts)
            self.pages.free(self._table.page_table[np.repeat(rows, counts), column])
