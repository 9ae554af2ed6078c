"""The map from pages to window pages, which are the pages in the KV memory of sliding-window layers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvariantError
from graftlm.memory.page_pool import PagePool
from graftlm.types import PageIds

__all__ = ["WindowPages", "WindowSpan"]

_NONE = -1


@dataclass(frozen=True, slots=True)
class WindowSpan:
    """The size of a sliding window in pages.

    Attributes:
        window_tokens: number of tokens that a token attends to, itself included.
        page_size: number of tokens in a page.
        spare_tokens: number of tokens directly before a row's window whose window pages the row keeps. A later prompt
            may branch off shortly before the row's end, because of another tokenization. The window pages before the
            branch are then needed.
    """

    window_tokens: int
    page_size: int
    spare_tokens: int = 0

    @property
    def reach_pages(self) -> int:
        """Number of earlier pages that the first token of a page attends to."""
        return -(-(self.window_tokens - 1) // self.page_size)

    @property
    def keep_pages(self) -> int:
        """Number of pages, directly before the page of a row's next token, whose window pages the row keeps."""
        return -(-(self.window_tokens - 1 + self.spare_tokens) // self.page_size)

    @property
    def stride_pages(self) -> int:
        """Number of pages by which a row's window must move before its window lock is shortened."""
        return max(self.reach_pages // 4, 1)

    @property
    def row_pages(self) -> int:
        """Maximum number of window pages that a row needs: own pages, locked cached pages, and the next page."""
        return self.keep_pages + self.stride_pages + 2

    def num_passed(self, computed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of a row's first pages need no window page any more.

        These are the pages before the window of the row's next token and before the spare tokens.

        Args:
            computed: int64, numbers of computed tokens of rows.

        Returns: int64, same shape as `computed`.
        """
        return np.maximum(computed // self.page_size - self.keep_pages, 0)


class WindowPages:
    """Assigns window pages to pages. Only attention uses window pages; all other code uses the page's id.

    Full-attention layers store keys and values in the page itself. Sliding-window layers have a smaller memory of their
    own, which contains only the pages that a query can still attend to. Example with 4 tokens per page, a window of 8
    and 18 computed tokens:

        page              3    7    8    1    5       a row's page table
        tokens            0-3  4-7  8-11 12-15 16-17
        window page       -    -    2    0    1       `-`: freed, because it is before the window

    Args:
        num_pages: number of pages of full-attention layers.
        num_window_pages: number of pages of sliding-window layers.
        span: size of the window.
    """

    def __init__(self, num_pages: int, num_window_pages: int, span: WindowSpan) -> None:
        self.span = span
        self._pool = PagePool(num_window_pages)
        self._window_page = np.full(num_pages, _NONE, dtype=np.int32)

    @property
    def reach_pages(self) -> int:
        """Number of earlier pages that the first token of a page attends to."""
        return self.span.reach_pages

    @property
    def num_window_pages(self) -> int:
        """Number of all window pages."""
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Number of free window pages."""
        return self._pool.num_free

    @property
    def num_held(self) -> int:
        """Number of window pages that are assigned to a page."""
        return self._pool.num_pages - self._pool.num_free

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return whether each page has a window page: bool, same shape as `pages`."""
        held: NDArray[np.bool_] = self._window_page[pages] != _NONE
        return held

    def assign(self, pages: PageIds) -> None:
        """Assign a window page to each page.

        Raises:
            InvariantError: a page already has a window page, or too few are free. Callers check `num_free` first.
        """
        if self.holds(pages).any():
            raise InvariantError(f"window pages: {pages[self.holds(pages)][:8].tolist()} have one already")
        self._window_page[pages] = self._pool.alloc(len(pages))

    def free(self, pages: PageIds) -> None:
        """Free the window pages of `pages`. Pages without a window page are ignored."""
        held = self._window_page[pages]
        self._window_page[pages] = _NONE
        self._pool.free(held[held != _NONE])

    def move(self, sources: PageIds, targets: PageIds) -> None:
        """Assign the window page of sources[i] to targets[i], for each i where only sources[i] has a window page."""
        moves = self.holds(sources) & ~self.holds(targets)
        self._window_page[targets[moves]] = self._window_page[sources[moves]]
        self._window_page[sources[moves]] = _NONE

    def readable(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the window pages of a page table: int32, same shape. Pages without one get 0, which is never read."""
        return np.maximum(self._window_page[pages], 0)

    def writable(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the window page of each page that a step writes: int32, same shape as `pages`.

        Raises:
            InvariantError: a page has no window page.
        """
        window_pages = self._window_page[pages]
        if len(window_pages) and window_pages.min() == _NONE:
            missing = np.unique(pages[window_pages == _NONE])[:8].tolist()
            raise InvariantError(f"window pages: a step writes pages {missing}, which have no window page")
        return window_pages

    def clear(self) -> None:
        """Free all window pages."""
        self._window_page[:] = _NONE
        self._pool = PagePool(self._pool.num_pages)

    def check(self, free_pages: NDArray[np.bool_]) -> None:
        """Verify that each window page is free or assigned to exactly one page that is not free.

        Args:
            free_pages: bool [num_pages], which pages are free.

        Raises:
            InvariantError: the check fails; the message has some of the pages.
        """
        holders = np.flatnonzero(self._window_page != _NONE)
        free = np.flatnonzero(self._pool.free_mask())
        owners = np.bincount(np.concatenate([free, self._window_page[holders]]), minlength=self.num_window_pages)
        if (owners != 1).any():
            wrong = np.flatnonzero(owners != 1)[:8].tolist()
            raise InvariantError(f"window pages {wrong} of {self.num_window_pages} have no owner or several")
        idle = holders[free_pages[holders]]
        if len(idle):
            raise InvariantError(f"pages {idle[:8].tolist()} are free, but have window pages")
