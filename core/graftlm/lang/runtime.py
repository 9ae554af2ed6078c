"""A server in a separate process, started and stopped by a program."""

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

from graftlm.errors import EngineError
from graftlm.lang.backends.endpoint import RuntimeEndpoint
from graftlm.lang.event_loop import wait_in_shared_loop

__all__ = ["Runtime"]

_READY: Final = b"serving on "
_MAX_LOG_BYTES: Final = 4000
_STOP_TIMEOUT_S: Final = 20.0


class Runtime:
    """Starts `graftlm serve` on a free port of this machine; its `endpoint` is a backend for programs.

        with Runtime(model_path="demo") as runtime:
            set_default_backend(runtime)

    The server stops with `shutdown`, at the end of the `with` block, or at the end of the process.

    Args:
        model_path: a checkpoint folder, a .gguf file, "demo", or the name of a model in the local Hugging Face cache.
        log_level: level of the server's log.
        launch_timeout: seconds until the server must be ready.
        port: TCP port; None: a free one.
        api_key: key of the server, which the endpoint sends.
        config: sections of the configuration, such as `{"cache": {"page_size": 16}}`.
        options: options of SGLang's server. `graftlm serve` refuses such an option; the message names graftlm's
            setting.

    Raises:
        EngineError: the server did not start; the message has the end of its log.
    """

    def __init__(
        self,
        log_level: str = "error",
        launch_timeout: float = 300.0,
        *,
        model_path: str,
        port: int | None = None,
        api_key: str | None = None,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        sections = dict(config or {})
        server = {"port": port or 0, "log_level": log_level, **sections.get("server", {})}
        if api_key is not None:
            server |= {"api_key": api_key, "open_admin": True}  # the holder of the key may also administer
        command = [sys.executable, "-c", "from graftlm.cli import main; main()", "serve", "--model", model_path]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        with tempfile.TemporaryDirectory(prefix="graftlm-runtime-") as folder, tempfile.TemporaryFile() as log:
            file = Path(folder) / "engine.yaml"  # a file, because other users can read the command line
            file.write_text(json.dumps({**sections, "server": server}), encoding="utf-8")
            process = subprocess.Popen(
                [*command, str(file)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
            self._finalizer = weakref.finalize(self, _stop, process)  # also at the end of the process
            try:
                self.url = _wait_for_url(process, log, launch_timeout)
            except BaseException:
                self.shutdown()
                raise
        self.endpoint = RuntimeEndpoint(self.url, api_key)

    @property
    def generate_url(self) -> str:
        """The URL of `/generate`."""
        return f"{self.url}/generate"

    def shutdown(self) -> None:
        """Stop the server; active requests fail. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.endpoint.close()
        self.shutdown()

    def cache_prefix(self, prefix: str) -> None:
        """Compute and cache a text."""
        wait_in_shared_loop(self.endpoint.cache_prefix(prefix))

    def start_profile(self) -> None:
        """Start a profile of the engine's steps."""
        self.endpoint.start_profile()

    def stop_profile(self) -> None:
        """Stop the profile and write its files."""
        self.endpoint.stop_profile()

    async def get_server_info(self) -> dict[str, Any]:
        """Return the server's configuration and state."""
        return await asyncio.to_thread(self.endpoint.get_server_info)

    def generate(
        self, prompt: str | Sequence[str], sampling_params: Mapping[str, Any] | None = None, **fields: Any
    ) -> str:
        """Send one request to /generate.

        Args:
            sampling_params: parameters under the names of /generate, such as `max_new_tokens`.
            fields: further fields of the body, such as `return_logprob`.

        Returns: the answer, as JSON text.

        Raises:
            GraftlmError: the server refuses, or cannot be reached.
        """
        text = prompt if isinstance(prompt, str) else list(prompt)
        body = {"text": text, "sampling_params": dict(sampling_params or {}), **fields}
        return json.dumps(self.endpoint.request("POST", "/generate", body))


def _wait_for_url(process: "subprocess.Popen[bytes]", log: IO[bytes], timeout_s: float) -> str:
    """Return the URL that the server prints when it is ready.

    Raises:
        EngineError: the process ended, or was not ready in time.
    """
    stdout = process.stdout
    assert stdout is not None  # it is a pipe
    found: list[str] = []
    is_over = threading.Event()

    def read() -> None:
        with stdout:
            for line in stdout:  # to the end, so that the pipe never fills
                if line.startswith(_READY):
                    found.append(line.removeprefix(_READY).decode().strip())
                    is_over.set()
        is_over.set()

    threading.Thread(target=read, name="graftlm-runtime", daemon=True).start()
    is_ready = is_over.wait(timeout_s)
    if found:
        return found[0]
    cause = f"it ended with status {process.wait()}" if is_ready else f"it was not ready within {timeout_s:g} s"
    log.seek(0)
    end = log.read()[-_MAX_LOG_BYTES:].decode(errors="replace").strip()
    raise EngineError(f"the server did not start: {cause}\n{end}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
