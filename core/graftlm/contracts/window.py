"""What a prefix cache knows of the memory of sliding-window layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.types import PageIds

__all__ = ["WindowEviction", "WindowView"]


class WindowView(Protocol):
    """Says which pages have a window page: keys and values of the layers with a sliding window."""

    @property
    def reach_pages(self) -> int:
        """How many pages in front of the end of a match must have one, for a request to go on from there."""
        ...

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return which of some pages have a window page: bool, of their shape."""
        ...


@dataclass(frozen=True, slots=True)
class WindowEviction:
    """What a cache gave up to make window pages free; the caller frees them.

    Attributes:
        pages: int32, pages that left the cache; those that have a window page give it back too.
        window_pages: int32, pages that stay in the cache and lost only their window page.
    """

    pages: PageIds
    window_pages: PageIds
