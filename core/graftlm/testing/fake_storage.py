"""A KV storage with blocks in memory, in a medium that tests can damage, break and fill."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import KVStorage, StorageContext, StorageStats

__all__ = ["FakeKVStorage", "FakeMedium"]

_Place = tuple[bytes, int, bytes]  # identity of a block in a medium: (fingerprint, block_bytes, key)


@dataclass(slots=True)
class FakeMedium:
    """A medium with the blocks of one or more fake storages. Its blocks remain after the storages are closed.

    Attributes:
        blocks: (fingerprint, block_bytes, key) -> (content of the block, hash of the content at the time of writing);
            least recently used block first.
        max_blocks: maximum number of blocks; None: no limit.
        is_broken: whether every operation fails.
        lock: lock that guards the other attributes.
    """

    blocks: dict[_Place, tuple[bytes, int]] = field(default_factory=dict)
    max_blocks: int | None = None
    is_broken: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def damage(self, context: StorageContext, key: bytes) -> None:
        """Flip one bit of a block."""
        with self.lock:
            place = (context.fingerprint, context.block_bytes, key)
            content, digest = self.blocks[place]
            self.blocks[place] = (bytes([content[0] ^ 1]) + content[1:], digest)

    def lose(self, context: StorageContext, key: bytes) -> None:
        """Remove a block from the medium."""
        with self.lock:
            del self.blocks[(context.fingerprint, context.block_bytes, key)]


class FakeKVStorage(KVStorage):
    """A KV storage with blocks in a `FakeMedium`. If the medium is full, the least recently used block is evicted.

    Args:
        context: fingerprint and size of the blocks.
        medium: the medium that contains the blocks; None: a new medium.
    """

    def __init__(self, context: StorageContext, medium: FakeMedium | None = None) -> None:
        self.medium = medium or FakeMedium()
        self._context = context
        self._counts: Counter[str] = Counter()

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return the number of stored keys before the first missing one."""
        with self.medium.lock:
            held = [self._place(key) in self.medium.blocks for key in keys]
        return held.index(False) if False in held else len(held)

    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Read one block into `out`, uint8 [block_bytes]; return whether an intact block was found."""
        with self.medium.lock:
            found = self._take(key)
            self._counts["misses" if found is None else "hits"] += 1
            if found is None:
                return False
            out[:] = np.frombuffer(found, np.uint8)
            return True

    def put(self, key: bytes, data: NDArray[np.uint8]) -> bool:
        """Store one block, uint8 [block_bytes]; return False if the medium is broken."""
        medium, place = self.medium, self._place(key)
        with medium.lock:
            if self._is_refused():
                return False
            if place in medium.blocks:
                return True
            while medium.max_blocks is not None and len(medium.blocks) >= medium.max_blocks:
                del medium.blocks[next(iter(medium.blocks))]
                self._counts["evicted"] += 1
            content = data.tobytes()
            medium.blocks[place] = (content, hash(content))
            self._counts["stored"] += 1
            return True

    def clear(self) -> None:
        """Delete all blocks of this fingerprint and block size."""
        with self.medium.lock:
            if not self._is_refused():
                for place in self._own():
                    del self.medium.blocks[place]

    def stats(self) -> StorageStats:
        """Return the numbers of blocks and bytes, and the counts of operations."""
        with self.medium.lock:
            num_blocks = len(self._own())
            num_bytes = num_blocks * self._context.block_bytes
            return StorageStats(num_blocks=num_blocks, num_bytes=num_bytes, **self._counts)

    def close(self) -> None:
        """Do nothing."""

    def _take(self, key: bytes) -> bytes | None:
        """Return a block and mark it as most recently used; return None and delete the block if it is damaged."""
        place = self._place(key)
        if self._is_refused() or place not in self.medium.blocks:
            return None
        content, digest = self.medium.blocks.pop(place)
        if hash(content) != digest:
            self._counts["corrupt"] += 1
            return None
        self.medium.blocks[place] = (content, digest)
        return content

    def _is_refused(self) -> bool:
        self._counts["failures"] += self.medium.is_broken
        return self.medium.is_broken

    def _place(self, key: bytes) -> _Place:
        return (self._context.fingerprint, self._context.block_bytes, key)

    def _own(self) -> list[_Place]:
        mine = (self._context.fingerprint, self._context.block_bytes)
        return [place for place in self.medium.blocks if place[:2] == mine]
