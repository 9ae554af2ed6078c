"""The file of finished requests that `graftlm cache-sim` replays, and the thread that writes it."""

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

#: Lines are collected up to so many bytes, as long as more requests wait.
_BUFFER_BYTES: Final = 2**20


class TraceRecorder:
    """Appends requests to a file. A disk that fails ends the record, and nothing else.

    The key of the hashes is drawn here and kept in memory only: whoever has the file cannot try out texts on it, and
    lines of two runs of a server have no id in common.
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
        """Open the file; one that is made here is its owner's to read only.

        Args:
            clock: that `FinishedRequest.arrived_s` is of.
            wall_clock: seconds since 1970; read once, so that timestamps never go back.
            max_waiting: requests that may wait for the disk; further ones are left out.

        Raises:
            ConfigError: it cannot be opened.
        """
        try:
            self._file = FileIO(os.fspath(path), "a", opener=_open_private)
        except OSError as error:
            raise ConfigError(
                f"server.record_trace: cannot append to {path}: {error.strerror or error}. Name a file that can be "
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
        self._lock = threading.Lock()  # of the three below
        self._is_open = True
        self._num_waiting = 0
        self._num_left_out = 0
        self._buffer = bytearray()  # the thread's own

    def record(self, request: FinishedRequest) -> None:
        """Have a request written; returns at once."""
        with self._lock:
            if not self._is_open:
                return
            if self._num_waiting >= self._max_waiting:
                self._num_left_out += 1
                return
            self._num_waiting += 1
            self._thread.submit(self._take_down, request)

    def close(self) -> None:
        """Write what waits and close the file; what comes later is not recorded."""
        with self._lock:
            self._is_open = False
        self._thread.shutdown(wait=True)
        self._file.close()
        if self._num_left_out:
            logger.warning("%s lacks %d request(s): the disk was too slow", self._path, self._num_left_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _take_down(self, request: FinishedRequest) -> None:
        with self._lock:
            self._num_waiting -= 1
            is_last = not self._num_waiting
        if self._file.closed:
            return  # it has failed
        try:
            for line in self._lines.of(request, round((self._epoch_s + request.arrived_s) * 1000)):
                self._buffer += line
            if is_last or len(self._buffer) >= _BUFFER_BYTES:
                self._flush()
        except OSError as error:
            logger.error("cannot write %s: %s; no more requests are recorded", self._path, error.strerror or error)
            self._give_up()
        except Exception:  # it is our own bug; nobody reads this thread's results, and the server goes on
            logger.exception("recording to %s failed; no more requests are recorded", self._path)
            self._give_up()

    def _flush(self) -> None:
        """Write the buffer whole, or leave the file as it was.

        Raises:
            OSError: it cannot be written.
        """
        end = self._file.seek(0, os.SEEK_END)
        rest = memoryview(bytes(self._buffer))
        self._buffer.clear()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # then the last line is torn, which readers tell with its number
                self._file.truncate(end)
            raise

    def _give_up(self) -> None:
        with self._lock:
            self._is_open = False
        self._file.close()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
