"""The free pages."""

import numpy as np

from graftlm.errors import InvariantError
from graftlm.types import PageIds

__all__ = ["PagePool"]


class PagePool:
    """A stack of free page ids. Fresh pages come in ascending runs, which kernels read fastest."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # top at the end
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._last_place = np.zeros(num_pages, dtype=np.int32)  # scratch: where in an array a page came last
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return self._num_free

    def alloc(self, num_pages: int) -> PageIds:
        """Take pages.

        Returns: int32 [num_pages], the caller's until it gives them to `free`.

        Raises:
            InvariantError: fewer are free. Callers ask `num_free` first.
        """
        if num_pages > self._num_free:
            raise InvariantError(f"page pool: asked for {num_pages} pages, {self._num_free} are free")
        top = self._num_free
        self._num_free = top - num_pages
        if num_pages == 1:  # as when one request decodes: at a third of the cost
            page = self._stack[self._num_free : top].copy()
            self._is_free[page[0]] = False
            return page
        pages = self._stack[self._num_free : top][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: PageIds) -> None:
        """Give pages back.

        Raises:
            InvariantError: one of them is free already, or given twice; nothing is changed then.
        """
        if not len(pages):
            return
        order = np.arange(len(pages), dtype=np.int32)
        self._last_place[pages] = order
        twice = self._is_free[pages] | (self._last_place[pages] != order)
        if twice.any():
            raise InvariantError(f"page pool: pages {pages[twice][:8].tolist()} are freed twice")
        self._is_free[pages] = True
        top = self._num_free + len(pages)
        self._stack[self._num_free : top] = pages[::-1]
        self._num_free = top

    def free_mask(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return bool [num_pages], a copy: which pages are free. For checks."""
        return self._is_free.copy()
