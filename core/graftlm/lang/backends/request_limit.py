"""Limits the active requests of a backend; further requests wait instead of failing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from graftlm.errors import QueueFullError

__all__ = ["RequestLimit"]

T = TypeVar("T")

_FIRST_DELAY_S = 0.01
_MAX_DELAY_S = 1.0


class RequestLimit:
    """Limits the number of active requests, and repeats requests for which the backend's queue is full."""

    def __init__(self, max_requests: int, max_wait_s: float = 60.0) -> None:
        """Create a limit.

        Args:
            max_wait_s: a request fails if other clients keep the queue full for this number of seconds.
        """
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._permits = asyncio.Semaphore(max_requests)

    def _permits_of_loop(self) -> asyncio.Semaphore:
        """Return the semaphore of the running loop; a forked process has another loop, and no active requests."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._permits = loop, asyncio.Semaphore(self._max_requests)
        return self._permits

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        """Wait until fewer than `max_requests` requests are active, then count as one of them."""
        async with self._permits_of_loop():
            yield

    async def retry(self, start: Callable[[], Awaitable[T]]) -> T:
        """Await `start()`; repeat this, with growing delays, while it raises QueueFullError.

        Raises:
            QueueFullError: the queue was full for too long.
        """
        waited_s, delay_s = 0.0, _FIRST_DELAY_S
        while True:
            try:
                return await start()
            except QueueFullError:
                if waited_s >= self._max_wait_s:
                    raise
            await asyncio.sleep(delay_s)
            waited_s += delay_s
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
