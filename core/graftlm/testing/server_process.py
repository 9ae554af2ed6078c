"""A `graftlm serve` of its own process tree: for tests, benchmarks and examples."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml

__all__ = ["ServerProcess", "wait_until"]

_READY = re.compile(r"^serving on (http://\S+)$")


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0, what: str = "the condition") -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it has not come true in time.
    """
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} has not come true within {timeout_s} s")
        time.sleep(0.01)


class ServerProcess:
    """Runs `graftlm serve` on a free port, and ends it.

        with ServerProcess({"model": "demo"}) as server:
            openai.OpenAI(base_url=server.url + "/v1", api_key="none")

    Attributes:
        url: where it listens.
        start_s: seconds until it took requests.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        on_log: Callable[[str], None] | None = None,
    ) -> None:
        """Start it and wait until it takes requests.

        Args:
            config: as a YAML file would hold it; the port is added.
            arguments: further ones of the command line.
            environment: variables beside this process's own.
            on_log: takes each line that it writes to standard error before it takes requests.

        Raises:
            RuntimeError: it ended, or took too long; the message holds what it wrote.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="graftlm-server-")
        folder = Path(self._folder.name)
        file = folder / "engine.yaml"
        values = dict(config or {})
        values["server"] = {"port": 0} | dict(values.get("server") or {})
        file.write_text(yaml.safe_dump(values))
        self._log_path = folder / "log"
        start_s = time.monotonic()
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from graftlm.cli import main; main()", "serve", str(file), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | dict(environment or {}),
            )
        self.url = self._wait_for_url(timeout_s, on_log)
        self.start_s = time.monotonic() - start_s

    @property
    def log(self) -> str:
        """What it has written to standard error."""
        return self._log_path.read_text(errors="replace")

    def children(self) -> dict[str, int]:
        """Return the processes behind it by role: "scheduler-0", "detokenizer", with their ids."""
        found: dict[str, int] = {}
        for line in self.log.splitlines():
            match = re.search(r"(scheduler-\d+|detokenizer) runs as pid (\d+)", line)
            if match is not None:
                found[match[1]] = int(match[2])
        return {name: pid for name, pid in found.items() if psutil.pid_exists(pid)}

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM and wait for the end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End it, by force if need be, and remove its files."""
        try:
            self.stop(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for_url(self, timeout_s: float, on_log: Callable[[str], None] | None) -> str:
        stdout = self.process.stdout
        assert stdout is not None  # it is a pipe
        found: list[str] = []

        def read() -> None:
            for line in stdout:
                match = _READY.match(line.decode())
                if match is not None:
                    found.append(match[1])

        num_shown = 0

        def is_over() -> bool:
            nonlocal num_shown
            ended = bool(found) or self.process.poll() is not None
            if on_log is not None:
                lines = self.log.split("\n")[:-1]  # the last one may still be written
                for line in lines[num_shown:]:
                    on_log(line)
                num_shown = len(lines)
            return ended

        threading.Thread(target=read, daemon=True).start()
        try:
            wait_until(is_over, timeout_s)
        except TimeoutError:
            self.process.kill()
        if not found:
            status, log = self.process.wait(), self.log
            self.close()
            raise RuntimeError(f"the server did not start (exit status {status}):\n{log}")
        return found[0]
