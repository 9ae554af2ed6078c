"""The blocks on the device that host memory does not have."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from graftlm.types import PageIds

__all__ = ["Residents"]


class Residents:
    """Finds the blocks that pages being given up belong to.

    A block is filed under its last page. Leaves go first, so that page is given up no later than the others of its
    block; and it belongs to that block alone, while earlier ones may be shared by blocks that part further on.
    """

    def __init__(self) -> None:
        self._by_last_page: dict[int, tuple[bytes, PageIds]] = {}
        self._is_last: NDArray[np.bool_] = np.zeros(1024, dtype=np.bool_)  # by page id

    def __len__(self) -> int:
        return len(self._by_last_page)

    def add(self, key: bytes, pages: PageIds) -> None:
        """File a block, int32 [pages of a block]."""
        last = int(pages[-1])
        if last >= len(self._is_last):
            self._is_last = np.concatenate([self._is_last, np.zeros(last + 1, dtype=np.bool_)])
        self._is_last[last] = True
        self._by_last_page[last] = (key, pages.copy())

    def take(self, pages: PageIds) -> list[tuple[bytes, PageIds]]:
        """Remove the blocks whose last page is among the pages, and return them with all of their pages."""
        known = pages[pages < len(self._is_last)]
        last = known[self._is_last[known]]
        self._is_last[last] = False
        return [self._by_last_page.pop(page) for page in last.tolist()]

    def __iter__(self) -> Iterator[tuple[bytes, PageIds]]:
        return iter(list(self._by_last_page.values()))
