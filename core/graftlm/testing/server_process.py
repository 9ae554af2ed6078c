"""Runs `graftlm serve` in a separate process tree, for tests, benchmarks and examples."""

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
    """Wait until a condition is true.

    Args:
        condition: function that returns whether the condition is true.
        timeout_s: time limit in seconds.
        what: name of the condition, for the error.

    Raises:
        TimeoutError: the condition is still false after `timeout_s`.
    """
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {timeout_s} s in vain for {what}")
        time.sleep(0.01)


class ServerProcess:
    """A context that runs `graftlm serve` on a free port, and stops the server at the end.

        with ServerProcess({"model": "demo"}) as server:
            openai.OpenAI(base_url=server.url + "/v1", api_key="none")

    Attributes:
        process: the process of `graftlm serve`.
        url: URL of the server.
        start_s: time from the start of the process until the server accepted requests, in seconds.
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
        """Start the server and wait until it accepts requests.

        Args:
            config: contents of the YAML file; if it has no port, a free port is added.
            arguments: additional command-line arguments.
            environment: environment variables, in addition to the variables of this process.
            timeout_s: time limit in seconds until the server accepts requests.
            on_log: function that is called with each line of the server's standard error until the server accepts
                requests.

        Raises:
            RuntimeError: the server ended, or did not accept requests in time. The message contains its log.
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
        """Text that the server has written to standard error so far."""
        return self._log_path.read_text(errors="replace")

    def children(self) -> dict[str, int]:
        """Return role, such as "scheduler-0" -> process id of the server's running child processes."""
        found: dict[str, int] = {}
        for line in self.log.splitlines():
            match = re.search(r"(scheduler-\d+|detokenizer) runs as pid (\d+)", line)
            if match is not None:
                found[match[1]] = int(match[2])
        return {name: pid for name, pid in found.items() if psutil.pid_exists(pid)}

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM and wait until the server has ended.

        Returns:
            The exit status of the process.

        Raises:
            subprocess.TimeoutExpired: the server has not ended after `timeout_s`.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Stop the server and remove its files. A server that does not stop within 20 s is killed."""
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
        assert stdout is not None  # stdout is a pipe
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
                lines = self.log.split("\n")[:-1]  # the last line may not be complete yet
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
