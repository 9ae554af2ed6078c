"""The pages of a draft model's KV memory, by row."""

from collections.abc import Container, Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowPages"]

_NO_PAGES: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class RowPages:
    """Gives pages to rows, and takes them from the rows that were used least recently.

    free + the pages of all rows == all pages

    Args:
        num_pages, page_size: size of the memory, in pages, and of a page in tokens.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._free = list(range(num_pages))
        self._rows: dict[int, NDArray[np.int32]] = {}  # the least recently used first

    @property
    def num_free(self) -> int:
        """Pages that no row has."""
        return len(self._free)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[int]:
        """Yield the rows that have pages, the most recently used first."""
        return reversed(list(self._rows))

    def of(self, row: int) -> NDArray[np.int32]:
        """Return a row's pages in order; int32, not a copy."""
        return self._rows.get(row, _NO_PAGES)

    def reserve(self, row: int, num_tokens: int, kept: Container[int]) -> list[int] | None:
        """Give a row pages for at least `num_tokens` tokens, and mark it as used.

        Args:
            kept: rows that keep their pages.

        Returns: the rows that lost all their pages; None if even so there are too few pages, and nothing has changed.
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
        """Take all pages of a row; does nothing if it has none."""
        self._free.extend(self._rows.pop(row, _NO_PAGES).tolist())
