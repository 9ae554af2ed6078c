"""The watchdog, which pings every child process and reports processes that do not answer."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final

from graftlm.processes.managed_child import ManagedChild
from graftlm.processes.messages import PING_ID, Call
from graftlm.processes.os_process import stacks_of

__all__ = ["PING_INTERVAL_S", "Watchdog"]

logger = logging.getLogger(__name__)

#: Seconds between two pings of a process.
PING_INTERVAL_S: Final = 2.0


class Watchdog:
    """Detects stuck child processes. All methods are called in one event loop.

    Args:
        children: the processes.
        limit_s: seconds without an answer after which a process is stuck.
        clock: a monotonic clock, in seconds.
        stuck: called with the name of a stuck process, and the seconds since the ping.
        recovered: called with the name of a stuck process that answers again.
    """

    def __init__(
        self,
        children: Collection[ManagedChild],
        limit_s: float,
        clock: Callable[[], float],
        stuck: Callable[[str, float], None],
        recovered: Callable[[str], None],
    ) -> None:
        self._children = children
        self._limit_s = limit_s
        self._clock = clock
        self._stuck = stuck
        self._recovered = recovered

    async def run(self) -> None:
        """Ping the processes until the task is cancelled."""
        interval_s = min(PING_INTERVAL_S, self._limit_s / 2)
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            for child in self._children:
                if not child.is_ready or child.outbox is None:
                    continue
                if child.pinged_s is None:
                    child.pinged_s = now
                    child.outbox.send(Call(call_id=PING_ID, name="ping"))
                elif now - child.pinged_s > self._limit_s and not child.is_stuck:
                    child.is_stuck = True
                    await self._report(child, now - child.pinged_s)

    def message_received(self, child: ManagedChild) -> None:
        """Record that a process has sent a message. Every message counts as an answer to a ping."""
        child.pinged_s = None
        if child.is_stuck:
            child.is_stuck = False
            logger.warning("%s answers again", child.name)
            self._recovered(child.name)

    async def _report(self, child: ManagedChild, seconds: float) -> None:
        self._stuck(child.name, seconds)
        assert child.process is not None  # it is ready
        stacks = await stacks_of(child.process, child.stacks_path)
        logger.error("%s has not answered for %.0f s; the stacks of its threads:\n%s", child.name, seconds, stacks)
