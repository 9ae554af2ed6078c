"""The blocks on the device that have no copy in host memory."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from graftlm.types import PageIds

__all__ = ["Residents"]


class Residents:
    """Finds the blocks of evicted pages.

    A block is stored under its last page, for two reasons. Leaves are evicted first, so the last page is evicted no
    later than the other pages of its block. And the last page belongs to one block only, whereas earlier pages may be
    shared by several blocks whose tokens differ later.
    """

    def __init__(self) -> None:
        self._by_last_page: dict[int, tuple[bytes, PageIds]] = {}
        self._is_last: NDArray[np.bool_] = np.zeros(1024, dtype=np.bool_)  # index: page id

    def __len__(self) -> int:
        return len(self._by_last_page)

    def add(self, key: bytes, pages: PageIds) -> None:
        """Add a block.

        Args:
            key: the block's key.
            pages: int32 [pages per block].
        """
        last = int(pages[-1])
        if last >= len(self._is_last):
            self._is_last = np.concatenate([self._is_last, np.zeros(last + 1, dtype=np.bool_)])
        self._is_last[last] = True
        self._by_last_page[last] = (key, pages.copy())

    def take(self, pages: PageIds) -> list[tuple[bytes, PageIds]]:
        """Remove the blocks whose last page is among `pages`. Return the key and all pages of each block."""
        known = pages[pages < len(self._is_last)]
        last = known[self._is_last[known]]
        self._is_last[last] = False
        return [self._by_last_page.pop(page) for page in last.tolist()]

    def __iter__(self) -> Iterator[tuple[bytes, PageIds]]:
        return iter(list(self._by_last_page.values()))
