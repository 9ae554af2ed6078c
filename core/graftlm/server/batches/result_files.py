"""The result files of a batch. Each result is appended exactly once, even if the process is killed."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

__all__ = ["ResultFiles"]


class ResultFiles:
    """Appends one line per result to one of two files. One has answers with status 200, the other has errors.

    A process that is killed leaves at most one incomplete last line. The next process removes this line and answers
    the request again.

    Attributes:
        num_completed, num_failed: numbers of lines in the files.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        """Open or create the files, and read the ids of the requests that have a result."""
        self._done: set[str] = set()
        self.num_completed = self.num_failed = 0
        self._output = self._open(output)
        try:
            self.num_completed = len(self._done)
            self._errors = self._open(errors)
        except BaseException:
            os.close(self._output)
            raise
        self.num_failed = len(self._done) - self.num_completed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Flush the files to the disk and close them."""
        for file in (self._output, self._errors):
            os.fsync(file)
            os.close(file)

    def has(self, custom_id: str) -> bool:
        """Return whether a request has a result."""
        return custom_id in self._done

    def add(self, custom_id: str, result: Mapping[str, Any], *, is_error: bool) -> None:
        """Append a result.

        Raises:
            OSError: the disk is full.
        """
        line = msgspec.json.encode({"custom_id": custom_id, **result}) + b"\n"
        file = self._errors if is_error else self._output
        end = os.fstat(file).st_size
        written = 0
        try:
            while written < len(line):
                written += os.write(file, line[written:])
        except OSError:
            os.ftruncate(file, end)  # remove the incomplete line
            raise
        self._done.add(custom_id)
        if is_error:
            self.num_failed += 1
        else:
            self.num_completed += 1

    def _open(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        end = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._done.add(msgspec.json.decode(line)["custom_id"])
                end += len(line)
        os.ftruncate(file, end)
        return file
