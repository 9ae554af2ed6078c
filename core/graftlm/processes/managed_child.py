"""The launcher's record of a child process and its replacements."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.processes.channels import Outbox
from graftlm.processes.os_process import ChildProcess

__all__ = ["ManagedChild"]


@dataclass(slots=True, eq=False)
class ManagedChild:
    """One child process. After its end, the record describes the process that replaces it.

    Attributes:
        generation: number of processes that have had this name, including the current one.
        process: the current process; None if there is none.
        outbox: channel to the current process.
        endpoint: address at which the current process receives messages.
        stacks_path: file to which the current process writes the stacks of its threads.
        ready: future that is done when the current process is ready. Its result is the `info` of the Ready message.
        end: description of how the last process ended; None if a process runs.
        last_error: the error with which the current process ends; None if it has sent none.
        failed_starts: number of consecutive processes that ended before they were ready.
        pinged_s: time of the watchdog's unanswered ping, in seconds of the watchdog's clock; None if there is none.
        is_stuck: whether the watchdog has reported the process as stuck.
    """

    name: str
    generation: int = 0
    process: ChildProcess | None = None
    outbox: Outbox | None = None
    endpoint: str = ""
    stacks_path: Path = Path()
    ready: asyncio.Future[dict[str, Any]] | None = None
    end: str | None = None
    last_error: str | None = None
    failed_starts: int = 0
    pinged_s: float | None = None
    is_stuck: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the current process is ready for messages."""
        ready = None if self.process is None else self.ready
        return ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None
