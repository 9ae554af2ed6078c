"""A prefix cache's view of the memory of sliding-window layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.types import PageIds

__all__ = ["WindowEviction", "WindowView"]


class WindowView(Protocol):
    """A read-only view of the pages that have a window page, which stores keys and values of sliding-window layers."""

    @property
    def reach_pages(self) -> int:
        """Number of pages before the end of a match that must have window pages before a request can continue there."""
        ...

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return whether each page has a window page: bool, same shape as `pages`."""
        ...


@dataclass(frozen=True, slots=True)
class WindowEviction:
    """The pages that a cache evicted to free window pages; the caller frees them.

    Attributes:
        pages: int32, ids of pages that were removed from the cache; the caller also frees their window pages, if any.
        window_pages: int32, ids of pages that stay in the cache and lose only their window page.
    """

    pages: PageIds
    window_pages: PageIds
