"""The window pages that running rows need: their own, and those of the cache that they keep there."""

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import PrefixCache, PrefixHandle
from graftlm.memory.request_table import RequestTable
from graftlm.memory.window_pages import WindowPages
from graftlm.types import PageIds

__all__ = ["RowWindows"]


class RowWindows:
    """Follows the window of every row, and gives up what it has passed.

        page table     |cached..|cached..|cached..|cached..|own.....|own.....|own..   |
        at admission            |<-  locked in the cache ->|                             the next token's window
        later on                         |<-   locked    ->|<-kept->|
        at last                                            |   -    |<-     kept    ->|

    The row's lock in the cache is made shorter now and then, when its window has passed `stride_pages` of it.

    A step reads the window in front of its first token and writes up to its last one, so these window pages must not
    be given to another row of the same step: `protect_step` keeps them until the step is planned. From then on they
    may be given away, because every step that is planned later also runs later.

    Attributes:
        page_table: int32 [R, P], the window pages of the request table's pages; entries that no window reaches are in
            range and mean nothing.
    """

    def __init__(self, pages: WindowPages, table: RequestTable) -> None:
        self.pages = pages
        self.page_table = np.zeros_like(table.page_table)
        self._table = table
        self._passed = np.zeros(table.num_rows, dtype=np.int64)  # leading pages that were given up
        self._locks: list[tuple[PrefixHandle, int] | None] = [None] * table.num_rows
        self._lock_len = np.zeros(table.num_rows, dtype=np.int64)  # pages of each lock, 0 for none
        self._step_locks: list[tuple[PrefixHandle, int]] = []

    def lock(self, row: int, cache: PrefixCache, handle: PrefixHandle) -> None:
        """Keep the window in front of a locked handle for a row, and let go of what the row kept before."""
        self._lock(row, cache, handle, min(self.pages.reach_pages, handle.num_pages))

    def _lock(self, row: int, cache: PrefixCache, handle: PrefixHandle, length: int) -> None:
        old = self._locks[row]
        cache.lock_window(handle, length)
        self._locks[row] = (handle, length)
        self._lock_len[row] = length
        if old is not None:
            cache.unlock_window(*old)

    def unlock(self, row: int, cache: PrefixCache) -> None:
        """Let go of what a row keeps in the cache; its handle is still locked."""
        lock = self._locks[row]
        if lock is not None:
            cache.unlock_window(*lock)
        self._locks[row] = None
        self._lock_len[row] = 0

    def look_up(self, row: int, start: int, end: int) -> None:
        """Take into the page table what a row's pages from `start` to `end` have now, as far back as a window sees."""
        start = max(start, end - self.pages.reach_pages)
        self.page_table[row, start:end] = self.pages.readable(self._table.page_table[row, start:end])

    def drop_row(self, row: int, cache: PrefixCache) -> None:
        """Forget a row."""
        self.unlock(row, cache)
        self._passed[row] = 0

    def protect_step(self, cache: PrefixCache, start: int, handle: PrefixHandle) -> None:
        """Keep what a step reads and writes of a published chunk until `settle`.

        Args:
            start: pages of the row that were published before the chunk.
            handle: the end of the chunk.
        """
        length = min(handle.num_pages - start + self.pages.reach_pages, handle.num_pages)
        cache.lock(handle)
        cache.lock_window(handle, length)
        self._step_locks.append((handle, length))

    def settle(self, cache: PrefixCache) -> None:
        """Give up what no later step needs: what the step just planned was the last to see."""
        for handle, length in self._step_locks:
            cache.unlock_window(handle, length)
            cache.unlock(handle)
        self._step_locks.clear()
        table = self._table
        passed = self.pages.span.num_passed(table.computed)
        moved = np.flatnonzero(passed > self._passed)
        if len(moved):
            self._give_up(moved, passed)
            self._passed[moved] = passed[moved]
            self._shorten_locks(moved, cache)

    def clear(self) -> None:
        """Forget every row; the cache that they held locks in is gone."""
        self.pages.clear()
        self._passed[:] = 0
        self._locks = [None] * self._table.num_rows
        self._lock_len[:] = 0
        self._step_locks.clear()

    def kept(self, row: int) -> PageIds:
        """Return the row's own pages that its window has not passed, a copy. For checks."""
        table = self._table
        first = max(int(table.cached_pages[row]), int(self._passed[row]))
        return table.page_table[row, first : table.num_pages[row]].copy()

    def _shorten_locks(self, rows: NDArray[np.int64], cache: PrefixCache) -> None:
        """Let go of what windows have passed in the cache, where it is worth it."""
        needed = np.maximum(self._table.cached_pages[rows] - self._passed[rows], 0)
        surplus = self._lock_len[rows] - needed
        worth_it = (surplus >= self.pages.span.stride_pages) | ((surplus > 0) & (needed == 0))
        for row, length in zip(rows[worth_it].tolist(), needed[worth_it].tolist(), strict=True):
            lock = self._locks[row]
            if lock is not None:
                self._lock(row, cache, lock[0], length)

    def _give_up(self, rows: NDArray[np.int64], passed: NDArray[np.int64]) -> None:
        """Take back the window pages of the rows' own pages in front of `passed`; published ones are the cache's."""
        first = np.maximum(self._passed[rows], self._table.cached_pages[rows])
        counts = np.maximum(passed[rows] - first, 0)
        total = int(counts.sum())
        if total:
            column = np.arange(total) + np.repeat(first - (np.cumsum(counts) - counts), counts)
            self.pages.take_back(self._table.page_table[np.repeat(rows, counts), column])
