"""The blocks in host memory."""

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
        slot: where it lies.
        num_pins: who reads or writes it at present; it is not evicted meanwhile.
        is_filled: whether its content is there; before, nobody may read it.
        is_doomed: it was forgotten while pinned, and its slot is free once it is not.
        from_storage: it was brought from storage, and no request has used it since.
    """

    key: bytes
    slot: int
    num_pins: int = 0
    is_filled: bool = False
    is_doomed: bool = False
    from_storage: bool = False


class HostTier:
    """A map from block keys to slots of host memory, of fixed size; evicts what was used least recently.

    A request touches its blocks from last to first, so that the ends of sequences go before what they stand on.
    Methods may be called from several threads: the scheduler's, and those that read and write storage.

    Args:
        memory: uint8 [num_slots, block_bytes].

    Attributes:
        num_evicted: blocks given up to make room, so far.
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
        """Blocks that fit."""
        return len(self.memory)

    def at(self, slot: int) -> HostBlock:
        """Return the block in a slot."""
        return self._by_slot[slot]

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the front on, are here or being filled."""
        for num_known, key in enumerate(keys):
            if key not in self._blocks:
                return num_known
        return len(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of a sequence's blocks; those that are not here are skipped."""
        with self._lock:
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def take(self, keys: Iterable[bytes]) -> list[HostBlock]:
        """Pin the filled blocks of the keys, up to the first that is not; returns them."""
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
        """Return a new, pinned block to fill; None when it is here already, or no block can go to make room."""
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
        """The content of a reserved block is there, and may be read; it stays pinned until `unpin`.

        Returns: False when it has been forgotten meanwhile.
        """
        with self._lock:
            block.is_filled = not block.is_doomed
            return block.is_filled

    def drop(self, block: HostBlock) -> None:
        """Forget a block; its slot is free once it is not pinned."""
        with self._lock:
            self._forget(block)

    def pin(self, block: HostBlock) -> None:
        """Keep a filled block from eviction."""
        with self._lock:
            block.num_pins += 1

    def unpin(self, block: HostBlock) -> None:
        """Undo one pin."""
        with self._lock:
            if block.num_pins == 0:
                raise InvariantError(f"host tier: unpin of slot {block.slot}, which nobody holds")
            block.num_pins -= 1
            if block.is_doomed and block.num_pins == 0:
                self._release(block)

    def clear(self) -> None:
        """Forget every block."""
        with self._lock:
            for block in list(self._blocks.values()):
                self._forget(block)

    def let_go(self) -> None:
        """Forget every block, and give up the memory; nothing is reserved any more."""
        self.clear()
        with self._lock:
            self.memory = self.memory[:0].copy()
            self._free.clear()

    def _evict(self) -> int | None:
        """Forget the least recently used block that is not pinned; returns its slot."""
        for block in self._blocks.values():
            if block.num_pins == 0:
                self._forget(block)
                self.num_evicted += 1
                return self._free.pop()
        return None

    def _forget(self, block: HostBlock) -> None:
        if block.is_doomed:
            return
        block.is_doomed = True
        block.is_filled = False
        del self._blocks[block.key]
        if block.num_pins == 0:
            self._release(block)

    def _release(self, block: HostBlock) -> None:
        del self._by_slot[block.slot]
        self._free.append(block.slot)
