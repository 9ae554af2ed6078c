"""The KV storage, which stores blocks as rows of an SQLite file; several engines may share the file."""

import sqlite3
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from graftlm.contracts import KVStorage, Options, StorageContext, StorageStats
from numpy.typing import NDArray
from pydantic import Field

__all__ = ["SqliteStorage", "SqliteStorageOptions"]

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS blocks"
    " (id INTEGER PRIMARY KEY, owner BLOB, key BLOB, checksum INTEGER, data BLOB, UNIQUE (owner, key))"
)


class SqliteStorageOptions(Options):
    """The entries of `cache.options.storage.options` in a configuration."""

    path: Path = Field(description="The file of the blocks. It is created if it does not exist.")
    max_bytes: int | None = Field(
        default=None, ge=1, description="Maximum size of the blocks of one model in bytes. Null: no limit."
    )
    timeout_s: float = Field(
        default=5.0, gt=0, description="Maximum time in seconds to wait for another process that writes."
    )


class SqliteStorage(KVStorage):
    """A storage in which owner (hash of fingerprint and block size) and key identify a block."""

    def __init__(self, options: SqliteStorageOptions, context: StorageContext) -> None:
        self._owner = blake2b(context.fingerprint, salt=context.block_bytes.to_bytes(16)).digest()
        self._block_bytes = context.block_bytes
        self._max_blocks = None if options.max_bytes is None else options.max_bytes // context.block_bytes
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            options.path, timeout=options.timeout_s, isolation_level=None, check_same_thread=False
        )
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", _SCHEMA):
            self._ask(statement)

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return the number of stored keys before the first missing one."""
        held = 0
        for key in keys:
            if not self._ask("SELECT 1 FROM blocks WHERE owner = ? AND key = ?", self._owner, key):
                break
            held += 1
        return held

    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Read one block into `out`; delete it if it is damaged."""
        rows = self._ask("SELECT checksum, data FROM blocks WHERE owner = ? AND key = ?", self._owner, key)
        for checksum, data in rows:
            if len(data) == self._block_bytes and zlib.crc32(data) == checksum:
                out[:] = np.frombuffer(data, np.uint8)
                self._count("hits")
                return True
            self._ask("DELETE FROM blocks WHERE owner = ? AND key = ?", self._owner, key)
            self._count("corrupt")
        self._count("misses")
        return False

    def put(self, key: bytes, data: NDArray[np.uint8]) -> bool:
        """Store one block, and evict the oldest blocks if there are too many."""
        if self._max_blocks == 0:
            return False
        block = data.tobytes()
        row = (self._owner, key, zlib.crc32(block), block)
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                added = self._database.execute(
                    "INSERT OR IGNORE INTO blocks (owner, key, checksum, data) VALUES (?, ?, ?, ?)", row
                ).rowcount
                evicted = self._drop_oldest() if added else 0
                self._database.execute("COMMIT")
            except sqlite3.Error:
                self._counts["failures"] += 1
                self._roll_back()
                return False
            self._counts.update(stored=added, evicted=evicted)
        return True

    def clear(self) -> None:
        """Delete all blocks of this owner."""
        self._ask("DELETE FROM blocks WHERE owner = ?", self._owner)

    def stats(self) -> StorageStats:
        """Return the number of blocks and the counts of operations."""
        rows = self._ask("SELECT COUNT(*) FROM blocks WHERE owner = ?", self._owner)
        num_blocks = rows[0][0] if rows else 0
        with self._lock:
            return StorageStats(num_blocks=num_blocks, num_bytes=num_blocks * self._block_bytes, **self._counts)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _ask(self, statement: str, *values: object) -> list[Any]:
        """Run one statement and return its rows. If it fails, count the failure and return no rows."""
        with self._lock:
            try:
                with closing(self._database.execute(statement, values)) as cursor:
                    return cursor.fetchall()
            except sqlite3.Error:
                self._counts["failures"] += 1
                return []

    def _drop_oldest(self) -> int:
        """Delete the oldest rows above the limit, in the transaction of `put`; return the number of deleted rows."""
        if self._max_blocks is None:
            return 0
        (num_blocks,) = self._database.execute("SELECT COUNT(*) FROM blocks WHERE owner = ?", (self._owner,)).fetchone()
        statement = "DELETE FROM blocks WHERE id IN (SELECT id FROM blocks WHERE owner = ? ORDER BY id LIMIT ?)"
        return self._database.execute(statement, (self._owner, max(num_blocks - self._max_blocks, 0))).rowcount

    def _roll_back(self) -> None:
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1
