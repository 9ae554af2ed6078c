"""The pages of a draft model's KV memory, by row."""

from collections.abc import Container, Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowPages"]

_NO_PAGES: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class RowPages:
    """Assigns pages to rows. If pages are missing, the least recently used rows lose their pages.

    Each page is either free or assigned to exactly one row.

    Args:
        num_pages: number of pages in the memory.
        page_size: number of tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._free = list(range(num_pages))
        self._rows: dict[int, NDArray[np.int32]] = {}  # row -> its pages; least recently used row first

    @property
    def num_free(self) -> int:
        """Number of pages that are not assigned to a row."""
        return len(self._free)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[int]:
        """Yield the rows that have pages, the most recently used first."""
        return reversed(list(self._rows))

    def of(self, row: int) -> NDArray[np.int32]:
        """Return a row's page ids in order, int32 [n]. The caller must not change the array."""
        return self._rows.get(row, _NO_PAGES)

    def reserve(self, row: int, num_tokens: int, kept: Container[int]) -> list[int] | None:
        """Assign a row pages for at least `num_tokens` tokens, and record a use of the row.

        Args:
            row: the row.
            num_tokens: number of tokens that need slots.
            kept: rows that must keep their pages.

        Returns: the rows that lost all their pages. None if there are too few pages; then nothing has changed.
        """
        held = self.of(row)
        num_missing = -(-num_tokens // self._page_size) - len(held)
        evicted: list[int] = []
        num_free = len(self._free)
        for other, pages in self._rows.items():
            if num_free >= num_missing:
                break
            if other != row and other not in kept:
                evicted.append(other)
                num_free += len(pages)
        if num_free < num_missing:
            return None
        for other in evicted:
            self.release(other)
        if num_missing > 0:
            added = [self._free.pop() for _ in range(num_missing)]
            held = np.concatenate([held, np.array(added, dtype=np.int32)])
        self._rows.pop(row, None)
        self._rows[row] = held
        return evicted

    def release(self, row: int) -> None:
        """Free all pages of a row; do nothing if the row has none."""
        self._free.extend(self._rows.pop(row, _NO_PAGES).tolist())
