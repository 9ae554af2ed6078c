"""A child process as the operating system sees it: how it is begun, looked into, and ended."""

import asyncio
import contextlib
import os
import signal
import sys
import sysconfig
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path

__all__ = ["command_line", "describe_end", "device_of", "end", "kill", "stacks_of"]

#: How long a process may take to end when it is told to.
END_TIMEOUT_S = 5.0
#: How often it is looked whether a process has written its stacks, and how many times.
_STACKS_INTERVAL_S, _STACKS_TRIES = 0.05, 20


def command_line() -> list[str]:
    """Return the command line of a child.

    With -m alone, files in the current folder would come before the modules whose names they have. They do in a child
    if they do in main, where that folder then stands before the standard library.
    """
    library = sysconfig.get_path("stdlib")
    first = sys.path[: sys.path.index(library)] if library in sys.path else sys.path
    flags = [] if {"", os.getcwd()} & set(first) else ["-P"]
    return [sys.executable, *flags, "-m", "graftlm.processes"]


def device_of(replica: int, environment: Mapping[str, str]) -> str:
    """Return the GPU of a replica, among those that the environment leaves visible; "" when it hides all."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return str(replica)
    visible = [device for device in value.split(",") if device]
    return visible[replica % len(visible)] if visible else ""


def describe_end(status: int) -> str:
    """Say how a process ended.

    Args:
        status: the exit status, or the negative number of the signal that killed it.
    """
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


async def end(process: Process) -> None:
    """Wait until a process has ended, and end it by force when it takes too long."""
    try:
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    except TimeoutError:
        kill(process)
        await process.wait()


def kill(process: Process) -> None:
    """End a process by force, if it has not ended this moment."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def stacks_of(process: Process, path: Path) -> str:
    """Have a process write its stacks, which works even while it holds the interpreter's lock, and read them.

    Args:
        path: where it writes them.
    """
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
    for _ in range(_STACKS_TRIES):
        await asyncio.sleep(_STACKS_INTERVAL_S)
        text = path.read_text()
        if text:
            return text
        if process.returncode is not None:
            return "(none: it has ended)"
    return "(none: it is stopped, or waits in the kernel)"
