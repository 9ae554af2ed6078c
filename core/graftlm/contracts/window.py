"""A prefix cache's view of the memory of sliding-window layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.types import PageIds

__all__ = ["WindowEviction", "WindowView"]


class WindowView(Protocol):
    """A view that returns which pages have a window page (keys and values of the layers with a sliding window)."""

    @property
    def reach_pages(self) -> int:
        """Number of pages before the end of a match that need window pages so that a request can continue there."""
        ...

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return which of the pages have a window page: bool, same shape as `pages`."""
        ...


@dataclass(frozen=True, slots=True)
class WindowEviction:
    """The pages that a cache evicted to free window pages; the caller frees them.

    Attributes:
        pages: int32, ids of pages that left the cache; the caller frees their window pages too, if they have any.
        window_pages: int32, ids of pages that stay in the cache and lose only their window page.
    """

    pages: PageIds
    window_pages: PageIds
