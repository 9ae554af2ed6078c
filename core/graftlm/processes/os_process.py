"""Child processes at the level of the operating system: start, end and stacks of their threads."""

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

#: Seconds to wait for the end of a process before it is killed.
END_TIMEOUT_S = 5.0
#: Seconds between two checks whether a process has written its stacks, and the number of checks.
_STACKS_INTERVAL_S, _STACKS_TRIES = 0.05, 20


class ChildProcess:
    """A child process that is started without fork handlers. An event loop can wait for its end.

    fork() runs the handlers that libraries have registered with pthread_atfork and os.register_at_fork. The handler of
    an OpenMP runtime (libiomp) waits in the child for threads that the child does not have. The child then never calls
    exec, and the parent hangs in fork_exec. asyncio and uvloop start processes with fork(). `subprocess.Popen` without
    preexec_fn, user, group and umask uses vfork on Linux, which runs no handlers.

    One thread per process runs all operations that may block. It starts the process, writes to the process's standard
    input, and waits for the end. The kernel suspends this thread, which holds the GIL, until the child has called exec.

    Attributes:
        pid: process id. The process is the leader of a new session.
        returncode: the exit status, or the negative number of a signal; None until the event loop is notified of the
            end.
    """

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self._ended = asyncio.Event()
        self.pid = popen.pid
        self.returncode: int | None = None

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], first_line: bytes) -> Self:
        """Start a process. If the start is cancelled, the process is killed.

        Args:
            environment: all environment variables of the process.
            first_line: bytes that are written to the standard input of the new process. The input stays open until the
                new process or the current process ends.

        Raises:
            OSError: the operating system cannot start the process.
        """
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Self] = loop.create_future()

        def run() -> None:
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
            with contextlib.suppress(OSError):  # `close` tries again to write the rest of the first line
                popen.stdin.close()
            _post(loop, process._note_end, returncode)

        try:
            threading.Thread(target=run, name="graftlm-child", daemon=True).start()
        except RuntimeError as error:  # the limit on threads is reached
            raise OSError(errno.EAGAIN, str(error)) from error
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            started.add_done_callback(_kill_started)
            raise

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit status, or the negative number of a signal."""
        await self._ended.wait()
        assert self.returncode is not None  # `_note_end` has set it
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal. This has no effect if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL. This has no effect if the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _note_end(self, returncode: int) -> None:
        self.returncode = returncode
        self._ended.set()


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], argument: Any) -> bool:
    """Call a function in an event loop, from another thread. Return False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, argument)
    except RuntimeError:
        return False
    return True


def _kill_started(started: "asyncio.Future[Any]") -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().kill()


def command_line(module: str = "graftlm.processes") -> list[str]:
    """Return the command line of a child that runs a module.

    `python -m` puts the current folder first in `sys.path`, so files in this folder could hide modules with the same
    name. The option -P prevents this. The option is omitted if the current folder also precedes the standard library
    in the `sys.path` of this process.
    """
    library = sysconfig.get_path("stdlib")
    first = sys.path[: sys.path.index(library)] if library in sys.path else sys.path
    flags = [] if {"", os.getcwd()} & set(first) else ["-P"]
    return [sys.executable, *flags, "-m", module]


def device_of(replica: int, environment: Mapping[str, str]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a replica: one visible GPU, or "" if none is visible."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return str(replica)
    visible = [device for device in value.split(",") if device]
    return visible[replica % len(visible)] if visible else ""


def describe_end(status: int) -> str:
    """Return a description of how a process ended.

    Args:
        status: the exit status, or the negative number of the signal that killed the process.
    """
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


async def end(process: ChildProcess) -> None:
    """Wait until a process has ended. Kill it if this takes longer than 5 s."""
    try:
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def stacks_of(process: ChildProcess, path: Path) -> str:
    """Return the stacks of a process's threads, or the reason why there are none.

    On SIGUSR1, a Python thread of the process writes the stacks. This thread holds the GIL, so the frames of other
    threads do not change in the meantime. If another thread never releases the GIL, nothing is written, and SIGUSR2 is
    sent. Its signal handler writes the stacks without the GIL, which could crash a process whose threads change their
    frames. Therefore SIGUSR2 is only the second try.

    Args:
        path: the file to which the process appends its stacks.
    """
    num_before = path.stat().st_size
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if _is_stopped(process.pid):
            break  # a stopped process handles the signal only after it continues
        process.send_signal(number)
        stacks = b""
        for _ in range(_STACKS_TRIES):
            await asyncio.sleep(_STACKS_INTERVAL_S)
            so_far, stacks = stacks, path.read_bytes()[num_before:]
            has_ended = process.returncode is not None
            if stacks and (stacks == so_far or has_ended):  # the stacks are complete
                return stacks.decode(errors="replace")
            if has_ended:
                return "(none: the process has ended)"
    return "(none: the process is stopped, or waits in the kernel)"


def _is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
