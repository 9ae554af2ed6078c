"""Waiting for room: requests beyond what a backend takes at once wait here, instead of failing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from graftlm.errors import QueueFullError

__all__ = ["Room"]

T = TypeVar("T")

_FIRST_DELAY_S = 0.01
_LONGEST_DELAY_S = 1.0


class Room:
    """Lets a number of requests pass at a time, and has those try again that find the queue full all the same."""

    def __init__(self, max_requests: int, give_up_s: float = 60.0) -> None:
        """Bound the requests.

        Args:
            give_up_s: seconds of finding the queue full after which a request fails: somebody else fills it.
        """
        self._max_requests = max_requests
        self._give_up_s = give_up_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(max_requests)

    def _places_of_loop(self) -> asyncio.Semaphore:
        """Return the places; all are free in another loop, that of a process which was forked off."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._places = loop, asyncio.Semaphore(self._max_requests)
        return self._places

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        async with self._places_of_loop():
            yield

    async def enter(self, start: Callable[[], Awaitable[T]]) -> T:
        """Await what `start` makes, again and again while that raises QueueFullError.

        Raises:
            QueueFullError: the queue was full for too long.
        """
        waited_s, delay_s = 0.0, _FIRST_DELAY_S
        while True:
            try:
                return await start()
            except QueueFullError:
                if waited_s >= self._give_up_s:
                    raise
            await asyncio.sleep(delay_s)
            waited_s += delay_s
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
