"""A SQLite table of responses, with a limit on their number and total size."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from graftlm.errors import ConfigError

__all__ = ["SqliteFile"]

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    body BLOB NOT NULL,
    items BLOB NOT NULL,
    num_bytes INTEGER NOT NULL
)
"""
_OLDEST: Final = "DELETE FROM responses WHERE number = (SELECT min(number) FROM responses)"


class SqliteFile:
    """Reads and writes the table. Several threads may use it."""

    def __init__(self, path: Path, max_responses: int, max_bytes: int) -> None:
        """Open the file. A missing file is created, readable only by its owner.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._path = path
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            path.touch(mode=0o600)
            with self._connection() as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"server.response_store.path: cannot open {path}: {error}. Set another file.") from error

    def read(self, response_id: str) -> tuple[bytes, bytes] | None:
        """Return the body and the items of a response; None if it is not stored."""
        with self._connection() as connection:
            row = connection.execute("SELECT body, items FROM responses WHERE id = ?", (response_id,)).fetchone()
        return None if row is None else (bytes(row[0]), bytes(row[1]))

    def write(self, response_id: str, body: bytes, items: bytes) -> None:
        """Store a response, and remove the oldest responses until no limit is exceeded."""
        with self._connection() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO responses (id, body, items, num_bytes) VALUES (?, ?, ?, ?)",
                (response_id, body, items, len(body) + len(items)),
            )
            while self._is_too_full(connection):
                connection.execute(_OLDEST)

    def remove(self, response_id: str) -> bool:
        """Remove a response, and return whether it was stored."""
        with self._connection() as connection:
            return connection.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount > 0

    def _is_too_full(self, connection: sqlite3.Connection) -> bool:
        count, num_bytes = connection.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM responses").fetchone()
        return bool(count > self._max_responses or num_bytes > self._max_bytes)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one transaction."""
        with self._lock, closing(sqlite3.connect(self._path)) as connection, connection:
            yield connection
