"""Finds lines of a user's program: the line that called the language, or that raised an error."""

import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from graftlm.errors import ProgramError

__all__ = ["CallSite", "call_site", "error_at", "function_error", "raising_site"]

E = TypeVar("E", bound=ProgramError)

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
    """Return the innermost line of a file in an error's traceback; None if the file is not in it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
    return CallSite(filename, frames[-1].lineno or 0, frames[-1].name) if frames else None


def error_at(kind: type[E], what: str, site: CallSite | None) -> E:
    """Return an error. Its message names the program's line `site`, unless `site` is None."""
    return kind(what) if site is None else kind(f"{what}\n  {site}", site.filename, site.lineno)


def function_error(error: BaseException, function: Callable[..., Any]) -> ProgramError:
    """Return the error with which a state fails after the program's function has raised `error`."""
    if isinstance(error, ProgramError):  # raised by a read of the state
        return error.again()
    code = getattr(inspect.unwrap(function), "__code__", None)
    site = None if code is None else raising_site(error, code.co_filename)
    made = error_at(ProgramError, f"the program's function raised {type(error).__name__}: {error}", site)
    made.__cause__ = error
    return made


def _is_ours(module: str) -> bool:
    # The stack of `with s.user():` has frames of contextlib between those of the program and of the language.
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.") or module == "contextlib"
