"""The contract of KV transfers: how a cache with lower tiers has blocks copied between the device and host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.types import PageIds

__all__ = ["BlockCopy", "KVTransfer", "StepCopies"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Pages of the device that are, or become, a part of one block in host memory.

    Attributes:
        slot: which block of the host memory.
        first_page: where in the block the part begins, in pages.
        pages: int32 [n], the pages on the device, in the order of their tokens.
    """

    slot: int
    first_page: int
    pages: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class StepCopies:
    """Copies that run with one step.

    The early ones are done before the step's forward pass begins, the others run beside it; all are done when the step
    is. Each tuple runs in its order, the tuples in the order given here.

    Attributes:
        early_stores: from pages that the step, or one of these loads, overwrites.
        early_loads: into pages that the step itself writes to later.
        loads: host to device. A layer's attention waits for that layer's loads only.
        stores: device to host.
    """

    early_stores: tuple[BlockCopy, ...] = ()
    early_loads: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockCopy, ...] = ()
    stores: tuple[BlockCopy, ...] = ()


class KVTransfer(Protocol):
    """Copies blocks of pages between the device and host memory, in order with the steps.

    A block is whole pages of consecutive tokens. Its bytes are contiguous: for every layer the keys of its tokens
    [tokens, H_kv, D], then their values. They do not depend on the page size.

    Copies are queued while the scheduler plans or commits, and go with the next step that is planned. The cache
    hears of them again when that step is committed, through `TieredPrefixCache.copied`, or `copies_lost`.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values over all layers."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the dtype of keys and values, such as "bfloat16"."""
        ...

    def allocate(self, num_blocks: int, pages_per_block: int) -> NDArray[np.uint8]:
        """Take host memory for blocks, in place of what this transfer held before.

        Returns: uint8 [num_blocks, block_bytes], which copies read and write by slot. Pinned when the device is CUDA.
        """
        ...

    def store(self, copy: BlockCopy) -> None:
        """Queue a copy from the device, of pages that steps planned so far, or the one being planned, have written."""
        ...

    def store_now(self, copy: BlockCopy) -> None:
        """Queue a copy from the device of pages that are given up: it goes with the step that is being planned."""
        ...

    def load(self, copy: BlockCopy) -> None:
        """Queue a copy to the device, for the step that is being planned and those after it to read."""
        ...

    def hurry(self, pages: PageIds) -> None:
        """Have queued stores of pages that are being given up go with the step that is being planned."""
        ...
