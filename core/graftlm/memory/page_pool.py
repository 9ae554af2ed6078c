"""The free pages."""

import numpy as np

from graftlm.errors import InvariantError
from graftlm.types import PageIds

__all__ = ["PagePool"]


class PagePool:
    """A stack of free page ids. Initially, pages are allocated in ascending order, which kernels read fastest."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the next page to allocate is the last element
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._last_place = np.zeros(num_pages, dtype=np.int32)  # scratch for `free`: page -> its last index in an array
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return self._num_free

    def alloc(self, num_pages: int) -> PageIds:
        """Allocate pages.

        Returns: int32 [num_pages], owned by the caller until it passes them to `free`.

        Raises:
            InvariantError: fewer pages are free. Callers check `num_free` first.
        """
        if num_pages > self._num_free:
            raise InvariantError(f"page pool: asked for {num_pages} pages, {self._num_free} are free")
        top = self._num_free
        self._num_free = top - num_pages
        if num_pages == 1:  # fast path for decode of one request; takes a third of the time
            page = self._stack[self._num_free : top].copy()
            self._is_free[page[0]] = False
            return page
        pages = self._stack[self._num_free : top][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: PageIds) -> None:
        """Return pages to the pool.

        Raises:
            InvariantError: a page is already free, or is passed twice; nothing is changed then.
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
        """Return which pages are free, bool [num_pages], for checks. The array is a copy."""
        return self._is_free.copy()
