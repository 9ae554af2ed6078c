"""The processes of ranks on this machine."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from graftlm.contracts import RankLaunch, RankProcesses
from graftlm.errors import EngineError

__all__ = ["LocalProcesses"]

_POLL_S = 0.01


class LocalProcesses(RankProcesses):
    """Starts one process per rank. A process ends when its standard input closes, so that it ends with this process.

    Args:
        launches: the processes.
        cpu_sets: CPUs of each process; None: any.

    Raises:
        EngineError: a process cannot be started. No process is left.
    """

    def __init__(self, launches: Sequence[RankLaunch], cpu_sets: Sequence[frozenset[int] | None]) -> None:
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for launch, cpus in zip(launches, cpu_sets, strict=True):
                self._processes.append(_started(launch))
                if cpus is not None:
                    os.sched_setaffinity(self._processes[-1].pid, cpus)
        except OSError as error:
            self.stop(0.0)
            raise EngineError(f"the process of rank {launch.rank} cannot be started: {error}") from error

    def place(self, rank: int) -> str:
        """Return the process id."""
        return f"pid {self._processes[rank].pid}"

    def ended(self) -> Mapping[int, str]:
        """Return how processes ended."""
        with self._lock:
            statuses = [process.poll() for process in self._processes]
        return {rank: _described(status) for rank, status in enumerate(statuses) if status is not None}

    def stop(self, timeout_s: float) -> None:
        """Wait for the end of all processes, and kill those that do not end in time."""
        until_s = time.monotonic() + timeout_s
        while len(self.ended()) < len(self._processes) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        for process in self._processes:
            with self._lock:
                process.kill()  # has no effect on a process that has ended
                process.wait()
                if process.stdin is not None:
                    with contextlib.suppress(OSError):
                        process.stdin.close()


def _started(launch: RankLaunch) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **launch.environment}
    process = subprocess.Popen(launch.command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    assert process.stdin is not None  # it is a pipe
    with contextlib.suppress(OSError):  # the process has ended, which `ended` reports
        process.stdin.write(launch.first_line)
        process.stdin.flush()
    return process


def _described(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
