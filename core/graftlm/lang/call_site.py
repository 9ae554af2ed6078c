"""The line of a user's program that called into the language."""

import sys
import traceback
from dataclasses import dataclass

__all__ = ["CallSite", "call_site", "raising_site"]

_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of a program."""

    filename: str
    lineno: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.filename}", line {self.lineno}, in {self.function}'


def call_site() -> CallSite:
    """Return the innermost line outside the language."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def raising_site(error: BaseException, filename: str) -> CallSite | None:
    """Return the innermost line of a file that an error came through; None when it came through none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
    return CallSite(filename, frames[-1].lineno or 0, frames[-1].name) if frames else None


def _is_ours(module: str) -> bool:
    # `with s.user():` passes through contextlib on its way to us.
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.") or module == "contextlib"
