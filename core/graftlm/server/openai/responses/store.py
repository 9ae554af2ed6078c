"""Stores of the responses that `previous_response_id` and GET requests read."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from graftlm.config import ResponseStoreSettings
from graftlm.server.openai.responses.sqlite_file import SqliteFile

__all__ = ["MemoryResponseStore", "ResponseStore", "SqliteResponseStore", "StoredResponse", "make_response_store"]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the conversation before it.

    Attributes:
        body: the response, as JSON.
        items: the conversation before the response's output, as a JSON array of items.
    """

    id: str
    body: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        """The number of bytes that count towards the store's limit."""
        return len(self.body) + len(self.items)


class ResponseStore(ABC):
    """Stores responses by id. If their number or total size exceeds a limit, the oldest responses are removed."""

    @abstractmethod
    async def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; None if it is not stored."""

    @abstractmethod
    async def put(self, response: StoredResponse) -> None:
        """Store a response. A response that is larger than the size limit of the store is not stored."""

    @abstractmethod
    async def delete(self, response_id: str) -> bool:
        """Remove a response, and return whether it was stored."""


class MemoryResponseStore(ResponseStore):
    """Stores responses in memory."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: dict[str, StoredResponse] = {}  # the oldest first

    async def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; None if it is not stored."""
        return self._responses.get(response_id)

    async def put(self, response: StoredResponse) -> None:
        """Store a response, and remove the oldest ones while a limit is exceeded."""
        await self.delete(response.id)
        self._responses[response.id] = response
        self._num_bytes += response.num_bytes
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            await self.delete(next(iter(self._responses)))

    async def delete(self, response_id: str) -> bool:
        """Remove a response, and return whether it was stored."""
        removed = self._responses.pop(response_id, None)
        if removed is None:
            return False
        self._num_bytes -= removed.num_bytes
        return True


class SqliteResponseStore(ResponseStore):
    """Stores responses in a SQLite database, which worker threads read and write."""

    def __init__(self, path: Path, max_responses: int, max_bytes: int) -> None:
        """Open the database, and create it if it does not exist.

        Raises:
            ConfigError: the database cannot be opened.
        """
        self._file = SqliteFile(path, max_responses, max_bytes)

    async def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; None if it is not stored."""
        row = await asyncio.to_thread(self._file.read, response_id)
        return None if row is None else StoredResponse(response_id, *row)

    async def put(self, response: StoredResponse) -> None:
        """Store a response, and remove the oldest ones while a limit is exceeded."""
        await asyncio.to_thread(self._file.write, response.id, response.body, response.items)

    async def delete(self, response_id: str) -> bool:
        """Remove a response, and return whether it was stored."""
        return await asyncio.to_thread(self._file.remove, response_id)


def make_response_store(settings: ResponseStoreSettings) -> ResponseStore:
    """Return the store that the settings describe.

    Raises:
        ConfigError: the database cannot be opened.
    """
    if settings.path is None:
        return MemoryResponseStore(settings.max_responses, settings.max_bytes)
    return SqliteResponseStore(Path(settings.path), settings.max_responses, settings.max_bytes)
