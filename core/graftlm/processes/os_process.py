"""A child process as the operating system sees it: how it is begun, looked into, and ended."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

__all__ = ["ChildProcess", "command_line", "describe_end", "device_of", "end", "stacks_of"]

#: How long a process may take to end when it is told to.
END_TIMEOUT_S = 5.0
#: How often it is looked whether a process has written its stacks, and how many times.
_STACKS_INTERVAL_S, _STACKS_TRIES = 0.05, 20


class ChildProcess:
    """A child process that is started without fork handlers, and whose end the event loop waits for.

    fork() runs the handlers that libraries have registered with pthread_atfork and os.register_at_fork. The handler of
    an OpenMP runtime (libiomp) waits in the child for threads that the child does not have, so the child never reaches
    exec, and the parent waits for it in fork_exec. asyncio and uvloop start processes that way. `subprocess.Popen`
    without preexec_fn, user, group and umask uses vfork on Linux, which runs no handlers.

    One thread for each process does everything that may block: it starts the process, writes to its standard input, and
    waits for its end. Until exec, the kernel suspends that thread, which holds the interpreter's lock.

    Attributes:
        pid: of the process, which leads a session of its own.
        returncode: as `describe_end` takes it; None until the event loop has heard of the end.
    """

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self._ended = asyncio.Event()
        self.pid = popen.pid
        self.returncode: int | None = None

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], first_line: bytes) -> Self:
        """Start a process; one whose start is cancelled is killed.

        Args:
            environment: all variables of the process.
            first_line: written to its standard input, which stays open until the process or this one ends.

        Raises:
            OSError: the operating system refuses.
        """
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Self] = loop.create_future()

        def live() -> None:
            try:
                popen = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
            except Exception as error:
                _post(loop, started.set_exception, error)
                return
            process = cls(popen)
            if not _post(loop, started.set_result, process):
                popen.kill()
            assert popen.stdin is not None  # it is a pipe
            with contextlib.suppress(OSError):  # the process has ended; `wait` returns its status
                popen.stdin.write(first_line)
                popen.stdin.flush()
            returncode = popen.wait()
            with contextlib.suppress(OSError):  # what could not be written is flushed once more
                popen.stdin.close()
            _post(loop, process._note_end, returncode)

        try:
            threading.Thread(target=live, name="graftlm-child", daemon=True).start()
        except RuntimeError as error:  # the limit of threads is reached
            raise OSError(errno.EAGAIN, str(error)) from error
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            started.add_done_callback(_kill_started)
            raise

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit status, or the negative number of a signal."""
        await self._ended.wait()
        assert self.returncode is not None  # `_note_end` has set it
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens once the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def kill(self) -> None:
        """End the process by force; nothing happens once it has ended."""
        self.send_signal(signal.SIGKILL)

    def _note_end(self, returncode: int) -> None:
        self.returncode = returncode
        self._ended.set()


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], argument: Any) -> bool:
    """Have an event loop call a function; returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, argument)
    except RuntimeError:
        return False
    return True


def _kill_started(started: "asyncio.Future[Any]") -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().kill()


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


async def end(process: ChildProcess) -> None:
    """Wait until a process has ended, and end it by force when it takes too long."""
    try:
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def stacks_of(process: ChildProcess, path: Path) -> str:
    """Return the stacks of a process's threads.

    SIGUSR1 makes a thread of the process write them, which holds the GIL, so that no other thread changes its frames
    meanwhile. A process in which no thread gets the GIL does not answer; SIGUSR2 makes its signal handler write them.
    That would crash a process whose other threads run.

    Args:
        path: the file that the process appends to.
    """
    num_before = path.stat().st_size
    for asking in (signal.SIGUSR1, signal.SIGUSR2):
        if _is_stopped(process.pid):
            break  # a signal would be handled when the process runs again
        process.send_signal(asking)
        stacks = b""
        for _ in range(_STACKS_TRIES):
            await asyncio.sleep(_STACKS_INTERVAL_S)
            so_far, stacks = stacks, path.read_bytes()[num_before:]
            has_ended = process.returncode is not None
            if stacks and (stacks == so_far or has_ended):  # all is written
                return stacks.decode(errors="replace")
            if has_ended:
                return "(none: it has ended)"
    return "(none: it is stopped, or waits in the kernel)"


def _is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
