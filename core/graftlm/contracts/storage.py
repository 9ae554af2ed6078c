"""The contract of a KV storage, which stores blocks of keys and values outside the engine's memory, named by hashes."""

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
        fingerprint: identifier of model weights, dtype and layout, of any length. Blocks with another fingerprint are
            foreign.
        block_bytes: size of every block in bytes.
    """

    fingerprint: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True)
class StorageStats:
    """The size of a storage's content, and counters since its creation.

    Attributes:
        num_blocks, num_bytes: numbers of blocks and bytes that are stored now, as counted by this storage object.
        hits, misses: numbers of `get` calls that found a block, and that found none; a damaged block is a miss.
        stored: number of blocks that `put` wrote.
        evicted: number of blocks that were removed to stay within a size limit.
        corrupt: number of blocks that were dropped because their checksum or length was wrong.
        foreign: number of blocks that were dropped because they belong to another model or format.
        failures: number of reads and writes that the medium failed, because it was full, missing or forbidden.
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
    """A map from hashes to blocks of bytes. Its content outlives the engine, and several engines may share it.

    A block's key is a chained hash of its namespace and of all tokens up to the block's end. Blocks with equal keys
    therefore have equal content, and blocks are never changed.

    Invariants, each checked by `graftlm.testing.KVStorageConformance`:
        - `get` fills `out` with exactly the data that was `put` for that key, or returns False. A damaged block (a
          flipped byte, a torn write, a truncated, foreign or missing file) is a miss; it is counted and dropped.
        - No method raises for a failure of the medium (full, slow, read-only, deleted while in use). Failures are
          counted.
        - Several threads may call methods at the same time.
        - A new storage on the same medium with the same fingerprint has the blocks that were stored before.
        - Storages with different fingerprints on one medium do not share blocks.
        - After every `put`, the content is within the size limit, if there is one.
    """

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """Return the number of keys before the first key whose block is missing.

        The result may be wrong: another process may remove blocks, or a block may be damaged. Only the result of `get`
        is reliable.
        """

    @abstractmethod
    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Read one block into `out`, uint8 [block_bytes], contiguous and writable.

        Returns: whether the block existed and was intact; if not, the content of `out` is undefined.
        """

    @abstractmethod
    def put(self, key: bytes, data: NDArray[np.uint8]) -> bool:
        """Store one block, uint8 [block_bytes], contiguous. The write is atomic, even if the process crashes.

        Returns: whether the block is stored now. A block that was stored before is not written again.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove all blocks of this fingerprint."""

    @abstractmethod
    def stats(self) -> StorageStats:
        """Return the counters; the call is fast."""

    @abstractmethod
    def close(self) -> None:
        """Finish pending writes, and release the medium. No other method is called afterwards."""
