"""The recorder, which writes one line for each finished request and for each step."""

import csv
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any, Self, TextIO

from graftlm import hookimpl
from graftlm.records import RequestRecord, StepRecord

__all__ = ["CsvRecorder"]


class CsvRecorder:
    """An observer that writes `requests-PID.csv` and `steps-PID.csv`; the first line of a file has the column names.

    Args:
        folder: folder of the files, created with the first record; None: nothing is written.
        clock: returns the value of the first column, in seconds since the epoch.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time) -> None:
        self._folder = folder
        self._clock = clock
        self._files: dict[str, TextIO] = {}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Return a recorder for the folder `GRAFTLM_CSV_FOLDER`; if the variable is unset, it writes nothing."""
        folder = environment.get("GRAFTLM_CSV_FOLDER")
        return cls(Path(folder) if folder else None)

    @hookimpl
    def request_finished(self, record: RequestRecord) -> None:
        """Write a line for a request; each number of tokens and each time has its own column."""
        self._write(
            "requests",
            {
                "request_id": record.request_id,
                "finish_reason": record.finish_reason.value,
                **asdict(record.usage),
                **asdict(record.timings),
                "num_retractions": record.num_retractions,
            },
        )

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        """Write a line for a step."""
        self._write("steps", asdict(record))

    def close(self) -> None:
        """Close the files; a later record opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        if kind not in self._files:
            self._files[kind] = self._opened(kind, ["time", *row])
        csv.writer(self._files[kind]).writerow([self._clock(), *row.values()])

    def _opened(self, kind: str, columns: list[str]) -> TextIO:
        assert self._folder is not None  # without a folder, no file is opened
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / f"{kind}-{os.getpid()}.csv").open("a", newline="", buffering=1)
        if file.tell() == 0:
            csv.writer(file).writerow(columns)
        return file
