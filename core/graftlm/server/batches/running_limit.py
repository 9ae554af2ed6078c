"""The limit on concurrent requests of batches."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

__all__ = ["RunningLimit"]

#: Seconds for which the lower limit still applies after the end of the last request that does not belong to a batch.
_BUSY_S: Final = 1.0
#: If the limit is 0, one request may start when no request of a batch has run for this number of seconds. Batches
#: therefore end even under constant traffic.
_MAX_WAIT_S: Final = 5.0
#: Interval in seconds at which a waiting request computes the limit again.
_POLL_S: Final = 0.05


class RunningLimit:
    """Limits the concurrent requests of batches. "Other requests" are requests that do not belong to a batch.

    The limit is lower while other requests run, and for one second afterwards. Running requests are not interrupted.
    """

    def __init__(
        self,
        alone: int,
        beside: int,
        num_others: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize the limit.

        Args:
            alone: the limit while no other request runs.
            beside: the limit while other requests run; with 0, one request may run every five seconds.
            num_others: returns the number of other requests.
            clock: a monotonic clock, in seconds.
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
        """Wait until the limit allows a request, and count the request as running during the context."""
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
