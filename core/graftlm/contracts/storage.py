"""The contract of a KV storage: blocks of keys and values outside the engine's memory, by content hash."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["KVStorage", "StorageContext", "StorageStats"]


@dataclass(frozen=True, slots=True)
class StorageContext:
    """The arguments of a storage's `create`.

    Attributes:
        fingerprint: identifies model weights, dtype and layout; blocks of another fingerprint are foreign. Any length.
        block_bytes: size of every block in bytes.
    """

    fingerprint: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True)
class StorageStats:
    """The storage's counters since its creation, and its content.

    Attributes:
        num_blocks, num_bytes: held now, as counted by this storage.
        hits, misses: results of `get`; a damaged block is a miss.
        stored: blocks written by `put`.
        evicted: blocks removed to stay within a size limit.
        corrupt: blocks dropped because their checksum or length was wrong.
        foreign: blocks dropped because they belong to another model or format.
        failures: reads and writes that failed on the medium (full, gone, forbidden).
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
    """A map from content hashes to blocks of bytes, which outlives the engine and may be shared by several engines.

    A block's key is a chained hash of its namespace and of all tokens up to its end. So equal keys mean equal content,
    and blocks are never changed.

    Invariants, each checked by `graftlm.testing.KVStorageConformance`:
        - `get` fills `out` with exactly the data that was `put` for that key, or returns False. Damage (a flipped byte,
          a torn write, a truncated, foreign or missing file) is a miss, is counted, and the block is dropped.
        - No method raises for a failure of the medium (full, slow, read-only, deleted while in use). Failures are
          counted.
        - Methods may be called from several threads at once.
        - A new storage over the same medium with the same fingerprint has the blocks that were stored before.
        - Two fingerprints on one medium never share a block.
        - A size limit holds after every `put`.
    """

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first keys are held; the count ends at the first missing key.

        The result may be wrong (another process removes blocks, a block is damaged): only the result of `get` is
        reliable.
        """

    @abstractmethod
    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Read one block into `out`, uint8 [block_bytes], contiguous and writable.

        Returns: whether the block existed and was intact; if not, the content of `out` is undefined.
        """

    @abstractmethod
    def put(self, key: bytes, data: NDArray[np.uint8]) -> bool:
        """Store one block, uint8 [block_bytes], contiguous. The write is atomic, also in a crash.

        Returns: whether the block is held now. A block that is held already is not written again.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove all blocks of this fingerprint."""

    @abstractmethod
    def stats(self) -> StorageStats:
        """Return the counters; cheap."""

    @abstractmethod
    def close(self) -> None:
        """Finish pending writes and release the medium. No other method is called afterwards."""
