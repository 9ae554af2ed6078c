"""Measures the delay of this client's event loop."""

import asyncio
import time
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

__all__ = ["LagMonitor"]

_INTERVAL_S: Final = 0.01


class LagMonitor:
    """A context that measures the delay of the event loop's timers, and the CPU time of the process.

    If the loop is delayed, an answer is read after it arrives, and the recorded time is too late. So this delay is part
    of every latency of the run.

    Attributes:
        lags_s: delay of a timer in seconds, measured every 10 ms.
        cpu_share: CPU time of the whole process / wall time; set at the end of the context.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.lags_s = array("d")
        self.cpu_share = 0.0
        self._clock = clock
        self._start = (0.0, 0.0)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._start = (self._clock(), time.process_time())
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        wall_s = self._clock() - self._start[0]
        self.cpu_share = (time.process_time() - self._start[1]) / wall_s if wall_s > 0 else 0.0

    async def _measure(self) -> None:
        while True:
            due_s = self._clock() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self.lags_s.append(max(0.0, self._clock() - due_s))
