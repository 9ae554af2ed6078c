"""A child process as the launcher keeps it: the present process under a name, and its successors."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.processes.channels import Outbox
from graftlm.processes.os_process import ChildProcess

__all__ = ["ManagedChild"]


@dataclass(slots=True, eq=False)
class ManagedChild:
    """One child process, and after its end the process that replaces it.

    Attributes:
        generation: number of processes that have had this name, the present one included.
        ready: done when the present process is ready, with the information that it sent.
        end: how the last process ended, while no process has replaced it.
        asked_s: clock reading of the watchdog's ping that is not answered yet; None: no ping is open.
        is_stuck: whether the watchdog has reported it.
    """

    name: str
    generation: int = 0
    process: ChildProcess | None = None
    outbox: Outbox | None = None
    endpoint: str = ""
    stacks_path: Path = Path()
    ready: asyncio.Future[dict[str, Any]] | None = None
    end: str | None = None
    failed_starts: int = 0
    asked_s: float | None = None
    is_stuck: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the present process takes messages."""
        ready = None if self.process is None else self.ready
        return ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None
