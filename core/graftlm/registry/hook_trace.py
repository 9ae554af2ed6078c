"""Prints the hook calls of loading, and the observers, to standard error if `GRAFTLM_TRACE_HOOKS` is 1."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final, TextIO, TypeVar

__all__ = ["HookTrace", "trace_of"]

_VARIABLE: Final = "GRAFTLM_TRACE_HOOKS"

T = TypeVar("T")


class HookTrace:
    """Calls functions and prints their duration and result.

    Args:
        stream: target of the lines; None: no lines.
        clock: clock in seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stream = stream
        self._clock = clock

    def call(self, what: str, plugin: str, function: Callable[[], T], describe: Callable[[T], str]) -> T:
        """Call a function and print a line, even if the function raises.

        Args:
            what: a hook, or "import".
            plugin: the plugin of the function.
            describe: function that returns the description of the result.
        """
        if self._stream is None:
            return function()
        begun_s = self._clock()
        outcome = "raised"
        try:
            result = function()
            outcome = describe(result)
            return result
        finally:
            took_ms = (self._clock() - begun_s) * 1000
            self.write(what, f"{plugin}: {outcome}, {took_ms:.1f} ms")

    def write(self, what: str, said: str) -> None:
        """Print a line for a hook."""
        if self._stream is not None:
            print(f"hooks[{os.getpid()}] {what:<28} {said}", file=self._stream)


def trace_of(environment: Mapping[str, str]) -> HookTrace:
    """Return the trace that the environment selects, which prints to standard error or nothing."""
    return HookTrace(sys.stderr if environment.get(_VARIABLE, "0") not in ("", "0") else None)
