"""The line of a user's program that called into the language."""

import sys
from dataclasses import dataclass

__all__ = ["CallSite", "call_site"]

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


def _is_ours(module: str) -> bool:
    # `with s.user():` passes through contextlib on its way to us.
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.") or module == "contextlib"
