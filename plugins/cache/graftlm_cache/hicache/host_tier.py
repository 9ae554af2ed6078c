"""The host tier: a map from block keys to blocks in host memory."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvariantError

__all__ = ["HostBlock", "HostTier"]


@dataclass(slots=True, eq=False)
class HostBlock:
    """One block in host memory.

    Attributes:
        key: content hash of the block.
        slot: row of the block in host memory.
        num_pins: number of current readers and writers; a pinned block is not evicted.
        is_filled: whether its content is complete; before that, it must not be read.
        is_dropped: whether it was removed from the tier. If it was pinned then, its slot becomes free with the last
            unpin.
        from_storage: whether it was read from storage, and no request has used it since then.
    """

    key: bytes
    slot: int
    num_pins: int = 0
    is_filled: bool = False
    is_dropped: bool = False
    from_storage: bool = False


class HostTier:
    """A map of fixed size from block keys to slots of host memory. It evicts the least recently used block.

    A request touches its blocks from last to first, so that later blocks of a sequence are evicted before earlier ones.
    Thread-safe: the scheduler's thread and the threads that read and write storage call it.

    Args:
        memory: uint8 [num_slots, block_bytes].

    Attributes:
        num_evicted: number of blocks evicted so far.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.num_evicted = 0
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first
        self._by_slot: dict[int, HostBlock] = {}
        self._free = list(range(len(memory) - 1, -1, -1))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def num_slots(self) -> int:
        """Number of blocks that fit into host memory."""
        return len(self.memory)

    def at(self, slot: int) -> HostBlock:
        """Return the block in a slot."""
        return self._by_slot[slot]

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys whose blocks are filled or being filled."""
        for num_known, key in enumerate(keys):
            if key not in self._blocks:
                return num_known
        return len(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record a use of a sequence's blocks; keys without a block are skipped."""
        with self._lock:
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def take(self, keys: Iterable[bytes]) -> list[HostBlock]:
        """Pin and return the filled blocks of the leading keys, up to the first key without a filled block."""
        taken: list[HostBlock] = []
        with self._lock:
            for key in keys:
                block = self._blocks.get(key)
                if block is None or not block.is_filled:
                    break
                block.num_pins += 1
                taken.append(block)
        return taken

    def reserve(self, key: bytes) -> HostBlock | None:
        """Return a new, pinned block to fill; None if the key has a block already, or all blocks are pinned."""
        with self._lock:
            if key in self._blocks:
                return None
            slot = self._free.pop() if self._free else self._evict()
            if slot is None:
                return None
            block = HostBlock(key, slot, num_pins=1)
            self._blocks[key] = self._by_slot[slot] = block
            return block

    def fill(self, block: HostBlock) -> bool:
        """Record that the content of a reserved block is complete. The block stays pinned until `unpin`.

        Returns: False if the block was dropped in the meantime.
        """
        with self._lock:
            block.is_filled = not block.is_dropped
            return block.is_filled

    def drop(self, block: HostBlock) -> None:
        """Remove a block from the tier; its slot becomes free when it is not pinned."""
        with self._lock:
            self._drop(block)

    def pin(self, block: HostBlock) -> None:
        """Protect a filled block from eviction."""
        with self._lock:
            block.num_pins += 1

    def unpin(self, block: HostBlock) -> None:
        """Undo one pin.

        Raises:
            InvariantError: the block is not pinned.
        """
        with self._lock:
            if block.num_pins == 0:
                raise InvariantError(f"host tier: unpin of slot {block.slot}, which is not pinned")
            block.num_pins -= 1
            if block.is_dropped and block.num_pins == 0:
                self._release(block)

    def clear(self) -> None:
        """Drop every block."""
        with self._lock:
            for block in list(self._blocks.values()):
                self._drop(block)

    def free_memory(self) -> None:
        """Drop every block and release the memory; later calls of `reserve` return None."""
        self.clear()
        with self._lock:
            self.memory = self.memory[:0].copy()
            self._free.clear()

    def _evict(self) -> int | None:
        """Drop the least recently used block that is not pinned. Returns its slot, or None if all are pinned."""
        for block in self._blocks.values():
            if block.num_pins == 0:
                self._drop(block)
                self.num_evicted += 1
                return self._free.pop()
        return None

    def _drop(self, block: HostBlock) -> None:
        if block.is_dropped:
            return
        block.is_dropped = True
        block.is_filled = False
        del self._blocks[block.key]
        if block.num_pins == 0:
            self._release(block)

    def _release(self, block: HostBlock) -> None:
        del self._by_slot[block.slot]
        self._free.append(block.slot)
