"""The contract of a KV transfer, which copies blocks between device and host memory for a cache with lower tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.types import PageIds

__all__ = ["BlockCopy", "KVTransfer", "StepCopies"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """A copy between pages of the device and a part of one block in host memory.

    Attributes:
        slot: index of the block in host memory.
        first_page: offset of the part in the block, in pages.
        pages: int32 [n], page ids on the device, in the order of their tokens.
    """

    slot: int
    first_page: int
    pages: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class StepCopies:
    """Copies that run with one step.

    Early copies finish before the step's forward pass begins. The other copies run in parallel with the forward pass,
    and finish with the step. The tuples run in the order of the attributes below, and the copies of a tuple in its
    order.

    Attributes:
        early_stores: copies from device to host, of pages that the step or one of these loads overwrites.
        early_loads: copies from host to device, into pages that the step also writes.
        loads: other copies from host to device. A layer's attention waits only for the loads of that layer.
        stores: other copies from device to host.
    """

    early_stores: tuple[BlockCopy, ...] = ()
    early_loads: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockCopy, ...] = ()
    stores: tuple[BlockCopy, ...] = ()


class KVTransfer(Protocol):
    """Copies blocks of pages between device and host memory, in a defined order with steps.

    A block is a number of whole pages of consecutive tokens. Its bytes are contiguous: for every layer, first the keys
    of the tokens, [tokens, H_kv, D], then their values. The bytes do not depend on the page size.

    Copies are queued while the scheduler plans or commits, and run with the next planned step. When that step is
    committed, `TieredPrefixCache.copied` or `copies_lost` is called.
    """

    @property
    def page_bytes(self) -> int:
        """Number of bytes of one page's keys and values in all layers."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the dtype of keys and values, such as "bfloat16"."""
        ...

    def allocate(self, num_blocks: int, pages_per_block: int) -> NDArray[np.uint8]:
        """Allocate host memory for blocks, in place of this transfer's previous memory.

        Returns: uint8 [num_blocks, block_bytes]; `BlockCopy.slot` is the first index. The memory is pinned if the
            device is CUDA.
        """
        ...

    def store(self, copy: BlockCopy) -> None:
        """Queue a copy to host memory of pages that steps write, up to the step that is being planned."""
        ...

    def store_now(self, copy: BlockCopy) -> None:
        """Queue a copy to host memory of pages that are being evicted, for the step that is being planned."""
        ...

    def load(self, copy: BlockCopy) -> None:
        """Queue a copy to the device, for the step that is being planned."""
        ...

    def hurry(self, pages: PageIds) -> None:
        """Move queued stores of pages that are being evicted to the step that is being planned."""
        ...
