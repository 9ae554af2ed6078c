"""Recording of finished requests in a file, which `graftlm cache-sim` can replay."""

import contextlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Final, Self

from graftlm.errors import ConfigError
from graftlm.processes.trace_lines import FinishedRequest, TraceLines

__all__ = ["TraceRecorder"]

logger = logging.getLogger(__name__)

#: Lines are written when no further request waits, or when the buffer has at least this number of bytes.
_BUFFER_BYTES: Final = 2**20


class TraceRecorder:
    """Appends finished requests to a file. If writing fails, the recording ends, but the server continues.

    The key of the hashes is random and only in memory. Therefore a reader cannot test whether the file contains a given
    text, and two runs of a server have no common ids.
    """

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_waiting: int = 4096,
    ) -> None:
        """Open the file. A new file is readable and writable only by its owner.

        Args:
            path: path of the file.
            block_tokens: number of tokens in a block.
            clock: the clock of `FinishedRequest.arrived_s`, monotonic, in seconds.
            wall_clock: returns Unix time in seconds. It is read only once, so that timestamps never decrease.
            max_waiting: maximum number of requests that wait for the disk. Further requests are not recorded.

        Raises:
            ConfigError: the file cannot be opened.
        """
        try:
            self._file = FileIO(os.fspath(path), "a", opener=_open_private)
        except OSError as error:
            raise ConfigError(
                f"server.record_trace: cannot append to {path}: {error.strerror or error}. Set a file that can be "
                "written, or null."
            ) from error
        mode = os.fstat(self._file.fileno()).st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            logger.warning("server.record_trace: other users may read or write %s (mode %03o)", path, mode & 0o777)
        self._path = path
        self._lines = TraceLines(secrets.token_bytes(32), block_tokens)
        self._epoch_s = wall_clock() - clock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftlm-trace")
        self._max_waiting = max_waiting
        self._lock = threading.Lock()  # protects the next three fields
        self._is_open = True
        self._num_waiting = 0
        self._num_dropped = 0
        self._buffer = bytearray()  # used only by the thread that writes the file

    def record(self, request: FinishedRequest) -> None:
        """Queue a request for writing. This does not block."""
        with self._lock:
            if not self._is_open:
                return
            if self._num_waiting >= self._max_waiting:
                self._num_dropped += 1
                return
            self._num_waiting += 1
            self._thread.submit(self._write, request)

    def close(self) -> None:
        """Write the queued requests and close the file. Later requests are not recorded."""
        with self._lock:
            self._is_open = False
        self._thread.shutdown(wait=True)
        self._file.close()
        if self._num_dropped:
            logger.warning(
                "%d request(s) were not recorded in %s: the disk was too slow", self._num_dropped, self._path
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _write(self, request: FinishedRequest) -> None:
        with self._lock:
            self._num_waiting -= 1
            is_last = not self._num_waiting
        if self._file.closed:
            return  # writing has failed before
        try:
            for line in self._lines.of(request, round((self._epoch_s + request.arrived_s) * 1000)):
                self._buffer += line
            if is_last or len(self._buffer) >= _BUFFER_BYTES:
                self._flush()
        except OSError as error:
            logger.error("cannot write %s: %s; no more requests are recorded", self._path, error.strerror or error)
            self._stop()
        except Exception:  # a bug must not stop the server; no caller reads this thread's result, so log the error here
            logger.exception("recording to %s failed; no more requests are recorded", self._path)
            self._stop()

    def _flush(self) -> None:
        """Write the whole buffer. If that fails, restore the file's previous length.

        Raises:
            OSError: the buffer cannot be written.
        """
        end = self._file.seek(0, os.SEEK_END)
        rest = memoryview(bytes(self._buffer))
        self._buffer.clear()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # if this fails, the last line is incomplete, and readers report it
                self._file.truncate(end)
            raise

    def _stop(self) -> None:
        with self._lock:
            self._is_open = False
        self._file.close()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
