"""How many requests of batches may run at a time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

__all__ = ["RunningLimit"]

#: For so long after the last other request, the lower limit holds.
_BUSY_S: Final = 1.0
#: With a limit of 0, one request runs after so long without any, so that batches end under constant traffic.
_MAX_WAIT_S: Final = 5.0
#: A waiting request looks for other requests so often.
_POLL_S: Final = 0.05


class RunningLimit:
    """Bounds the requests that run at a time; the bound is lower while other requests run, and for a second after.

    Requests that run already are not interrupted.
    """

    def __init__(
        self,
        alone: int,
        beside: int,
        num_others: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the bounds.

        Args:
            alone: while no other request runs.
            beside: while others run; 0 lets one run every five seconds.
            num_others: the number of other requests.
            clock: seconds; never goes back.
        """
        self.alone = alone
        self._beside = min(alone, beside)
        self._num_others = num_others
        self._clock = clock
        self._busy_until_s: float | None = None
        self._running = 0
        self._last_end_s = clock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a place among the running requests, and keep it for the context."""
        while self._running >= self._limit():
            self._freed.clear()
            try:
                await asyncio.wait_for(self._freed.wait(), _POLL_S)
            except TimeoutError:
                continue
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._last_end_s = self._clock()
            self._freed.set()

    def _limit(self) -> int:
        now_s = self._clock()
        if self._num_others() > 0:
            self._busy_until_s = now_s + _BUSY_S
        if self._busy_until_s is None or now_s >= self._busy_until_s:
            return self.alone
        return max(self._beside, int(now_s - self._last_end_s >= _MAX_WAIT_S))
