"""The copies that wait for the next step."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import BlockCopy, StepCopies
from graftlm.types import PageIds

__all__ = ["TransferQueue"]


class TransferQueue:
    """Gives every step the copies that have to run with it; implements `KVTransfer`.

    Every step that is planned later also runs later, and a step's copies run with it. Hence:
        - Pages that step n writes may be stored with step n + 1: what is stored while n is planned waits one step.
        - Pages given up while n is planned were written before n. Whoever gets them writes to them in step n at the
          earliest; stores of them are early copies of step n, so they read what was there before.
        - Pages loaded with step n may be published while n is planned: whoever matches them runs in n or later.

    Args:
        page_bytes: of keys and values of one page, over all layers.
        dtype: of keys and values.
        page_size: tokens in a page.
        allocate: takes host memory; see `KVTransfer.allocate`.
    """

    def __init__(
        self, page_bytes: int, dtype: str, page_size: int, allocate: Callable[[int, int], NDArray[np.uint8]]
    ) -> None:
        self.page_bytes = page_bytes
        self.dtype = dtype
        self.allocate = allocate
        self._page_size = page_size
        self._fresh: list[BlockCopy] = []  # stores that may be of pages which the step being planned writes
        self._stores: list[BlockCopy] = []
        self._loads: list[BlockCopy] = []
        self._in_flight: list[StepCopies] = []

    def store(self, copy: BlockCopy) -> None:
        """Queue a copy from the device; see `KVTransfer.store`."""
        self._fresh.append(copy)

    def store_now(self, copy: BlockCopy) -> None:
        """Queue a copy from the device of pages that are given up; see `KVTransfer.store_now`."""
        self._stores.append(copy)

    def load(self, copy: BlockCopy) -> None:
        """Queue a copy to the device; see `KVTransfer.load`."""
        self._loads.append(copy)

    def hurry(self, pages: PageIds) -> None:
        """Have queued stores of pages that are being given up go with the step that is being planned.

        What that step writes belongs to rows that take part in it, which hold it: it is not given up.
        """
        if not self._fresh:
            return
        urgent = [copy for copy in self._fresh if np.isin(copy.pages, pages).any()]
        self._stores += urgent
        self._fresh = [copy for copy in self._fresh if copy not in urgent]

    def begin_plan(self) -> None:
        """A step is about to be planned: what was stored up to now was written by steps planned before."""
        self._stores += self._fresh
        self._fresh = []

    def take(self, out_slots: NDArray[np.int64]) -> StepCopies | None:
        """Return the copies that go with a step, or None.

        Args:
            out_slots: int64 [T], the slots that the step writes.
        """
        if not self._stores and not self._loads:
            return None
        written = np.unique(out_slots // self._page_size)
        loads, targets = tuple(self._loads), [copy.pages for copy in self._loads]
        early_stores, stores = _split(self._stores, np.concatenate([written, *targets]))
        # A load whose row has lost its pages again is overtaken by what the step, or a load after it, writes there.
        if any(np.isin(pages, written).any() for pages in targets):
            copies = StepCopies(early_stores, loads, (), stores)
        else:
            copies = StepCopies(early_stores, (), loads, stores)
        self._stores, self._loads = [], []
        self._in_flight.append(copies)
        return copies

    def take_all(self) -> StepCopies | None:
        """Return every queued copy, when no step is planned to take them and none is in flight; or None."""
        self.begin_plan()
        return self.take(np.empty(0, dtype=np.int64))

    def landed(self, copies: StepCopies) -> None:
        """Forget copies that have been made."""
        self._in_flight.remove(copies)

    def drop(self) -> list[StepCopies]:
        """Forget everything queued or in flight; returns it."""
        queued = StepCopies(stores=(*self._stores, *self._fresh), loads=tuple(self._loads))
        dropped = [*self._in_flight, queued]
        self._fresh, self._stores, self._loads, self._in_flight = [], [], [], []
        return dropped


def _split(copies: list[BlockCopy], pages: NDArray[np.integer]) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
    """Return the copies that touch any of the pages, and the others, each in order."""
    touch = [bool(np.isin(copy.pages, pages).any()) for copy in copies]
    return (
        tuple([copy for copy, touches in zip(copies, touch, strict=True) if touches]),
        tuple([copy for copy, touches in zip(copies, touch, strict=True) if not touches]),
    )
