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

        page table   |cached..|cached..|cached..|own.....|own.....|own..   |
        at admission          |<- locked in the cache  ->|                   the window in front of the next token
        later on                       |<-   locked    ->|<- kept        ->|
        at last                                 no lock  |  -     |<- kept ->|

    A step reads the window in front of its first token and writes up to its last one, so these window pages must not
    be given to another row of the same step: `protect_step` keeps them until the step is planned. From then on they
    may be given away, because every step that is planned later also runs later.
    """

    def __init__(self, pages: WindowPages, table: RequestTable) -> None:
        self.pages = pages
        self._table = table
        self._passed = np.zeros(table.num_rows, dtype=np.int64)  # leading pages that were given up
        self._locks: list[tuple[PrefixHandle, int] | None] = [None] * table.num_rows
        self._has_lock = np.zeros(table.num_rows, dtype=np.bool_)
        self._step_locks: list[tuple[PrefixHandle, int]] = []

    def lock(self, row: int, cache: PrefixCache, handle: PrefixHandle) -> None:
        """Keep the window in front of a locked handle for a row, and let go of what the row kept before."""
        old = self._locks[row]
        length = min(self.pages.reach_pages, handle.num_pages)
        cache.lock_window(handle, length)
        self._locks[row] = (handle, length)
        self._has_lock[row] = True
        if old is not None:
            cache.unlock_window(*old)

    def unlock(self, row: int, cache: PrefixCache) -> None:
        """Let go of what a row keeps in the cache; its handle is still locked."""
        lock = self._locks[row]
        if lock is not None:
            cache.unlock_window(*lock)
        self._locks[row] = None
        self._has_lock[row] = False

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
            for row in moved[self._has_lock[moved] & (passed[moved] >= table.cached_pages[moved])].tolist():
                self.unlock(row, cache)

    def clear(self) -> None:
        """Forget every row; the cache that they held locks in is gone."""
        self.pages.clear()
        self._passed[:] = 0
        self._locks = [None] * self._table.num_rows
        self._has_lock[:] = False
        self._step_locks.clear()

    def kept(self, row: int) -> PageIds:
        """Return the row's own pages that its window has not passed, a copy. For checks."""
        table = self._table
        first = max(int(table.cached_pages[row]), int(self._passed[row]))
        return table.page_table[row, first : table.num_pages[row]].copy()

    def _give_up(self, rows: NDArray[np.int64], passed: NDArray[np.int64]) -> None:
        """Take back the window pages of the rows' own pages in front of `passed`; published ones are the cache's."""
        first = np.maximum(self._passed[rows], self._table.cached_pages[rows])
        counts = np.maximum(passed[rows] - first, 0)
        total = int(counts.sum())
        if total:
            column = np.arange(total) + np.repeat(first - (np.cumsum(counts) - counts), counts)
            self.pages.take_back(self._table.page_table[np.repeat(rows, counts), column])
