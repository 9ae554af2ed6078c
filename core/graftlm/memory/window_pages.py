"""Which pages have a place in the memory of sliding-window layers, and which place."""

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
    """How many pages in front of a token its window reaches.

    Attributes:
        window_tokens: a token sees itself and this many - 1 tokens before it.
        page_size: tokens in a page.
        spare_tokens: how many tokens more a row keeps in front of its window. A prompt that goes on from a little
            before the row's end, because its last tokens were written otherwise, then still finds its whole window.
    """

    window_tokens: int
    page_size: int
    spare_tokens: int = 0

    @property
    def reach_pages(self) -> int:
        """Pages in front of a page boundary that the next token may see."""
        return -(-(self.window_tokens - 1) // self.page_size)

    @property
    def keep_pages(self) -> int:
        """Pages in front of the page of its next token that a row keeps."""
        return -(-(self.window_tokens - 1 + self.spare_tokens) // self.page_size)

    @property
    def stride_pages(self) -> int:
        """Pages that a row's window must have passed in the cache before the row lets go of them."""
        return max(self.reach_pages // 4, 1)

    @property
    def row_pages(self) -> int:
        """Window pages that a row holds at most, of its own and of the cache, the one it may reserve next included."""
        return self.keep_pages + self.stride_pages + 2

    def num_passed(self, computed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many leading pages need no window page once so many tokens are computed: int64, same shape."""
        return np.maximum(computed // self.page_size - self.keep_pages, 0)


class WindowPages:
    """Lends window pages to pages. A page keeps its id everywhere; only attention asks where its window page is.

    Layers that see all tokens store keys and values at the page itself. Layers with a sliding window have a smaller
    memory of their own, and need only the pages that a query may still see. With 4 tokens a page, a window of 8 and
    18 tokens computed:

        page              3    7    8    1    5       a row's page table
        tokens            0-3  4-7  8-11 12-15 16-17
        window page       -    -    2    0    1       `-`: given back when the window had passed it

    Args:
        num_pages: pages of the layers that see all tokens, whose ids are `PageIds`.
        num_window_pages: pages of the layers with a window.
        span: how far a window reaches.
    """

    def __init__(self, num_pages: int, num_window_pages: int, span: WindowSpan) -> None:
        self.span = span
        self._pool = PagePool(num_window_pages)
        self._window_page = np.full(num_pages, _NONE, dtype=np.int32)

    @property
    def reach_pages(self) -> int:
        """Pages in front of a page boundary that the next token may see."""
        return self.span.reach_pages

    @property
    def num_window_pages(self) -> int:
        """All window pages there are."""
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Window pages that no page holds."""
        return self._pool.num_free

    @property
    def num_held(self) -> int:
        """Window pages that some page holds."""
        return self._pool.num_pages - self._pool.num_free

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return which of some pages have a window page: bool, of their shape."""
        held: NDArray[np.bool_] = self._window_page[pages] != _NONE
        return held

    def give(self, pages: PageIds) -> None:
        """Give each page a window page.

        Raises:
            InvariantError: a page has one, or fewer are free. Callers ask `num_free` first.
        """
        if self.holds(pages).any():
            raise InvariantError(f"window pages: {pages[self.holds(pages)][:8].tolist()} have one already")
        self._window_page[pages] = self._pool.alloc(len(pages))

    def take_back(self, pages: PageIds) -> None:
        """Take the window pages of those pages that have one."""
        held = self._window_page[pages]
        self._window_page[pages] = _NONE
        self._pool.free(held[held != _NONE])

    def move(self, givers: PageIds, takers: PageIds) -> None:
        """Hand window pages on, from each page that has one to the page beside it that has none."""
        moves = self.holds(givers) & ~self.holds(takers)
        self._window_page[takers[moves]] = self._window_page[givers[moves]]
        self._window_page[givers[moves]] = _NONE

    def readable(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the window pages of a page table: int32, of its shape; 0 where there is none, which nobody reads."""
        return np.maximum(self._window_page[pages], 0)

    def writable(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the window pages of pages that a step writes to: int32, of their shape.

        Raises:
            InvariantError: one has none.
        """
        window_pages = self._window_page[pages]
        if len(window_pages) and window_pages.min() == _NONE:
            missing = np.unique(pages[window_pages == _NONE])[:8].tolist()
            raise InvariantError(f"window pages: pages {missing} are to be written and have none")
        return window_pages

    def clear(self) -> None:
        """Take every window page back, whoever holds it."""
        self._window_page[:] = _NONE
        self._pool = PagePool(self._pool.num_pages)

    def check(self, free_pages: NDArray[np.bool_]) -> None:
        """Verify that every window page is free or held by exactly one page, and that no free page holds one.

        Args:
            free_pages: bool [num_pages], which pages are free.

        Raises:
            InvariantError: naming some that are not.
        """
        holders = np.flatnonzero(self._window_page != _NONE)
        free = np.flatnonzero(self._pool.free_mask())
        owners = np.bincount(np.concatenate([free, self._window_page[holders]]), minlength=self.num_window_pages)
        if (owners != 1).any():
            wrong = np.flatnonzero(owners != 1)[:8].tolist()
            raise InvariantError(f"window pages {wrong} of {self.num_window_pages} are lost, or owned twice")
        idle = holders[free_pages[holders]]
        if len(idle):
            raise InvariantError(f"pages {idle[:8].tolist()} are free, but hold window pages")
