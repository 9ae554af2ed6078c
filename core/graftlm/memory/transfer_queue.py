"""The queue of copies between device and host memory that the next steps run."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import BlockCopy, StepCopies
from graftlm.types import PageIds

__all__ = ["TransferQueue"]


class TransferQueue:
    """Assigns queued copies to steps; implements `KVTransfer`.

    Steps run in the order in which they are planned, and each step runs its copies. Therefore:
        - A store that is queued while step n is planned runs with step n + 1, because step n may write its pages.
        - Pages that are evicted while n is planned were written before n, and their next owner may write them in n.
          Their stores run at the start of step n, before it writes, so they copy the old content.
        - Pages that step n loads may be inserted into the cache while n is planned, because a request that reuses them
          runs in step n or later.

    Args:
        page_bytes: size in bytes of one page's keys and values in all layers.
        dtype: dtype of keys and values.
        page_size: number of tokens in a page.
        allocate: function that allocates host memory; see `KVTransfer.allocate`.
    """

    def __init__(
        self, page_bytes: int, dtype: str, page_size: int, allocate: Callable[[int, int], NDArray[np.uint8]]
    ) -> None:
        self.page_bytes = page_bytes
        self.dtype = dtype
        self.allocate = allocate
        self._page_size = page_size
        self._fresh: list[BlockCopy] = []  # stores of pages that the step that is being planned may write
        self._stores: list[BlockCopy] = []
        self._loads: list[BlockCopy] = []
        self._in_flight: list[StepCopies] = []

    def store(self, copy: BlockCopy) -> None:
        """Queue a copy from the device; see `KVTransfer.store`."""
        self._fresh.append(copy)

    def store_now(self, copy: BlockCopy) -> None:
        """Queue a copy of pages that are being evicted for the next step; see `KVTransfer.store_now`."""
        self._stores.append(copy)

    def load(self, copy: BlockCopy) -> None:
        """Queue a copy to the device; see `KVTransfer.load`."""
        self._loads.append(copy)

    def hurry(self, pages: PageIds) -> None:
        """Move queued stores of pages that are being evicted to the step that is being planned.

        This step does not write the evicted pages, because rows own or lock all pages that a step writes.
        """
        if not self._fresh:
            return
        urgent = [copy for copy in self._fresh if np.isin(copy.pages, pages).any()]
        self._stores += urgent
        self._fresh = [copy for copy in self._fresh if copy not in urgent]

    def begin_plan(self) -> None:
        """Start a plan: its step can run all stores queued so far, because earlier steps write their pages."""
        self._stores += self._fresh
        self._fresh = []

    def take(self, out_slots: NDArray[np.int64]) -> StepCopies | None:
        """Return the copies for the step that is being planned, or None.

        Args:
            out_slots: int64 [T], the slots that the step writes.
        """
        if not self._stores and not self._loads:
            return None
        written = np.unique(out_slots // self._page_size)
        loads, targets = tuple(self._loads), [copy.pages for copy in self._loads]
        early_stores, stores = _split(self._stores, np.concatenate([written, *targets]))
        # If the row of a load was retracted meanwhile, this step may write the load's pages, so the load must run
        # first.
        if any(np.isin(pages, written).any() for pages in targets):
            copies = StepCopies(early_stores, loads, (), stores)
        else:
            copies = StepCopies(early_stores, (), loads, stores)
        self._stores, self._loads = [], []
        self._in_flight.append(copies)
        return copies

    def take_all(self) -> StepCopies | None:
        """Return all queued copies, or None, in order to run them without a step. No step may be in flight."""
        self.begin_plan()
        return self.take(np.empty(0, dtype=np.int64))

    def copies_done(self, copies: StepCopies) -> None:
        """Remove finished copies from those in flight."""
        self._in_flight.remove(copies)

    def drop(self) -> list[StepCopies]:
        """Remove all copies that are queued or in flight, and return them."""
        queued = StepCopies(stores=(*self._stores, *self._fresh), loads=tuple(self._loads))
        dropped = [*self._in_flight, queued]
        self._fresh, self._stores, self._loads, self._in_flight = [], [], [], []
        return dropped


def _split(copies: list[BlockCopy], pages: NDArray[np.integer]) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
    """Split copies into those with at least one of the pages and the other copies. Both results are in order."""
    touch = [bool(np.isin(copy.pages, pages).any()) for copy in copies]
    return (
        tuple([copy for copy, touches in zip(copies, touch, strict=True) if touches]),
        tuple([copy for copy, touches in zip(copies, touch, strict=True) if not touches]),
    )
