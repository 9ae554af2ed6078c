"""The contract of a KV storage: blocks of keys and values kept outside the engine's memory, by content hash."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["KVStorage", "StorageContext", "StorageStats"]


@dataclass(frozen=True, slots=True)
class StorageContext:
    """What a storage is created with.

    Attributes:
        fingerprint: names model weights, dtype and layout; blocks of another fingerprint are foreign. Any length.
        block_bytes: size of every block.
    """

    fingerprint: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True)
class StorageStats:
    """Sums since the storage was created, and what it holds.

    Attributes:
        num_blocks, num_bytes: held now, as far as this storage knows.
        hits, misses: answers of `get`; a damaged block is a miss.
        stored: blocks that `put` wrote.
        evicted: blocks removed to stay within a size limit.
        corrupt: blocks dropped because their checksum or length was wrong.
        foreign: blocks dropped because they belong to another model or format.
        failures: reads and writes that the medium refused (full, gone, forbidden).
    """

    num_blocks: int = 0
    num_bytes: int = 0
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    corrupt: int = 0
    foreign: int = 0
    failures: int = 0


class KVStorage(ABC):
    """A map from content hashes to blocks of bytes that outlives the engine, and may be shared by several.

    A block's key is a chained hash of its namespace and of all tokens up to its end, so equal keys mean equal content,
    and no block is ever changed.

    Invariants, each checked by `graftlm.testing.KVStorageConformance`:
        - `get` fills `out` with exactly what `put` was given for that key, or returns False. Damage (a flipped byte, a
          torn write, a truncated, foreign or missing file) is a miss, is counted, and the block is dropped.
        - No method raises for anything the medium does: full, slow, read-only, deleted underneath. It is counted.
        - Methods may be called from several threads at once.
        - A storage made anew over the same medium, with the same fingerprint, has what was stored before.
        - Two fingerprints never share a block, on one medium.
        - A size limit holds after every `put`.
    """

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the front on, are held; the first one missing ends the count.

        It may be wrong (another process removes blocks, a block is damaged): only `get` decides.
        """

    @abstractmethod
    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Read one block into `out`, uint8 [block_bytes], contiguous and writable.

        Returns: whether it was there and intact; if not, `out` holds anything.
        """

    @abstractmethod
    def put(self, key: bytes, data: NDArray[np.uint8]) -> bool:
        """Keep one block, uint8 [block_bytes], contiguous. It appears whole or not at all, also after a crash.

        Returns: whether it is held now. A block that is held already is not written again.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every block of this fingerprint."""

    @abstractmethod
    def stats(self) -> StorageStats:
        """Return counts; cheap."""

    @abstractmethod
    def close(self) -> None:
        """Finish writes under way and let go of the medium. No other method is called after it."""
