"""The processes of ranks, each started by a command such as `nice -n 5`."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from graftlm.contracts import RankLaunch, RankOptions, RankProcesses
from pydantic import Field

__all__ = ["PrefixOptions", "PrefixedProcesses"]


class PrefixOptions(RankOptions):
    """The entries of `parallel.options` in a configuration."""

    prefix: tuple[str, ...] = Field(
        default=(), description="Command that starts each process, such as `[numactl, --localalloc]`."
    )


class PrefixedProcesses(RankProcesses):
    """Starts one process per rank, on this machine."""

    def __init__(self, launches: Sequence[RankLaunch], prefix: Sequence[str]) -> None:
        self._processes = [self._start(launch, prefix) for launch in launches]

    def _start(self, launch: RankLaunch, prefix: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*prefix, *launch.command],
            stdin=subprocess.PIPE,
            env={**os.environ, **launch.environment},
            start_new_session=True,
        )
        process.stdin.write(launch.first_line)
        process.stdin.flush()  # the input stays open: the process ends when it is closed
        return process

    def place(self, rank: int) -> str:
        """Return the process id."""
        return f"pid {self._processes[rank].pid}"

    def ended(self) -> Mapping[int, str]:
        """Return how processes ended."""
        statuses = [process.poll() for process in self._processes]
        return {rank: _described(status) for rank, status in enumerate(statuses) if status is not None}

    def stop(self, timeout_s: float) -> None:
        """Wait for the end of all processes, then kill the others."""
        until_s = time.monotonic() + timeout_s
        while len(self.ended()) < len(self._processes) and time.monotonic() < until_s:
            time.sleep(0.01)
        for process in self._processes:
            process.kill()  # has no effect on a process that has ended
            process.wait()
            process.stdin.close()


def _described(status: int) -> str:
    return f"ended with exit status {status}" if status >= 0 else f"killed by signal {-status}"
