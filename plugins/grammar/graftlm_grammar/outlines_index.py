"""Builds indexes of `outlines`, each first in a separate process as a trial.

Building an index cannot be interrupted, and its time and memory can be exponential in the length of the expression:
`(a|b)*a(a|b){40}` has 2**40 states, and outlines_core 0.2.14 does not finish even `b[a-z]{0,60}[0-9]`. A separate
process can be killed. After a successful trial, the index is built again in this process instead of being sent: reading
an index holds the interpreter's lock (0.6 s for 400 MiB), whereas building it does not.
"""

import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any, BinaryIO, Final, cast

import outlines_core

from graftlm.errors import GrammarError
from graftlm_grammar import outlines_worker
from graftlm_grammar.outlines_worker import read_message, write_message

__all__ = ["IndexBuilder"]

_REMEDY: Final = "use xgrammar or llguidance, or shorter repetitions"


class IndexBuilder:
    """Builds an index after a separate process has built it successfully. Thread-safe.

    The process is started for the first expression, and again after it was killed.

    Args:
        vocabulary: the vocabulary in the library's form.
        max_s: maximum seconds per expression.
        max_bytes: maximum memory of an index.
    """

    def __init__(self, vocabulary: Any, max_s: float, max_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._max_s = max_s
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._worker: _Worker | None = None

    def build(self, regex: str) -> Any:
        """Return the library's index of a regular expression.

        Raises:
            GrammarError: the build takes too long or needs too much memory, or no tokens form a matching text.
        """
        with self._lock:
            start_s = time.monotonic()
            reason = self._ask(regex)
        if reason is None and time.monotonic() - start_s < self._max_s:
            raise GrammarError(
                f"outlines needs more than max_index_mib, {self._max_bytes >> 20} MiB, to compile the grammar; "
                f"{_REMEDY}"
            )
        if reason is None:
            raise GrammarError(f"not compiled by outlines within max_compile_s, {self._max_s:g} s; {_REMEDY}")
        if reason:
            raise GrammarError(f"not compiled by outlines: {reason.decode(errors='replace')}; {_REMEDY}")
        return outlines_core.Index(regex, self._vocabulary)

    def _ask(self, regex: str) -> bytes | None:
        """Return the answer of the process; None if it ended without an answer."""
        worker = self._worker or self._start()
        timer = Timer(self._max_s, worker.process.kill)
        timer.start()
        try:
            write_message(worker.source, regex.encode())
            answer = read_message(worker.sink)
        except BrokenPipeError:
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            worker.end()
            self._worker = None
        return answer

    def _start(self) -> "_Worker":
        worker = self._worker = _Worker()
        weakref.finalize(self, worker.end)
        write_message(worker.source, self._max_bytes.to_bytes(8, "little"))
        write_message(worker.source, self._vocabulary.__reduce__()[1][0])
        return worker


class _Worker:
    def __init__(self) -> None:
        command = [sys.executable, "-I", str(Path(outlines_worker.__file__))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self.source = cast(BinaryIO, self.process.stdin)
        self.sink = cast(BinaryIO, self.process.stdout)

    def end(self) -> None:
        """Kill the process, and wait until it has ended."""
        self.process.kill()
        self.process.wait()
        self.sink.close()
        with suppress(BrokenPipeError):  # closing flushes data that the process has not read
            self.source.close()
