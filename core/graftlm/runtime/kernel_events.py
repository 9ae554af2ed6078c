"""Reports the use and the compilation of kernels.

Kernels are compiled deep in the call stack, also in plugins. A watch is stored in a context variable, so functions need
not pass it as an argument.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "KernelOrigin",
    "KernelUse",
    "KernelWatch",
    "kernel_refused",
    "kernel_used",
    "kernels_reported",
    "print_line",
    "say",
    "watching",
]

_logger = logging.getLogger(__name__)


#: Origin of a compiled library: "compiled" by this call; "cache": found in the cache folder or compiled by another
#: process; "wheel": part of the installed package.
KernelOrigin = Literal["compiled", "cache", "wheel"]


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One use of a compiled kernel.

    The loader of kernels reports it to the active watches.

    Attributes:
        name: name of the source file, without the suffix.
        library: the compiled file.
        seconds: time in seconds until the library was available.
        origin: origin of the library.
        level: instruction-set level for which the library is compiled; "native": exactly this CPU.
    """

    name: str
    library: Path
    seconds: float
    origin: KernelOrigin
    level: str

    @property
    def compiled(self) -> bool:
        """Whether this call compiled the kernel."""
        return self.origin == "compiled"


class KernelWatch:
    """Records the uses of kernels while it is active.

    Args:
        say: function that is called with each line for the user, such as when a kernel is compiled; None: no lines are
            shown.

    Attributes:
        uses: one entry per use of a kernel.
        refused: name of a kernel -> reason why it cannot be compiled or loaded.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.say = say
        self.uses: list[KernelUse] = []
        self.refused: dict[str, str] = {}

    @property
    def compiled(self) -> list[KernelUse]:
        """The uses that compiled a kernel."""
        return [use for use in self.uses if use.compiled]

    def report(self) -> str | None:
        """Return one line about the compiled kernels; None if none was compiled."""
        compiled = self.compiled
        if not compiled:
            return None
        seconds = sum(use.seconds for use in compiled)
        kernels = "1 kernel" if len(compiled) == 1 else f"{len(compiled)} kernels"
        folders = ", ".join(sorted({str(use.library.parent) for use in compiled}))
        return f"compiled {kernels} in {seconds:.1f} s, stored in {folders}"

    def summary(self) -> str | None:
        """Return one line about the kernels in use, by level and origin; None if there are none."""
        groups: dict[str, list[str]] = {}
        for name, use in {use.name: use for use in self.uses}.items():
            groups.setdefault(f"{use.level} from the {_PLACES[use.origin]}", []).append(name)
        listed = "; ".join(f"{', '.join(sorted(names))} ({where})" for where, names in groups.items())
        return f"kernels: {listed}" if listed else None

    def complaint(self) -> str | None:
        """Return one line about missing kernels and the effect of this; None if no kernel is missing."""
        if not self.refused:
            return None
        reason = next(iter(self.refused.values())).partition("\n")[0].strip()
        return (
            f"no compiled kernels for {', '.join(sorted(self.refused))}: PyTorch's operations run instead, and a "
            f"decode step takes 2 to 10 times as long. {reason}"
        )


_PLACES: dict[KernelOrigin, str] = {"compiled": "compiler", "cache": "cache", "wheel": "wheel"}
_watches: ContextVar[tuple[KernelWatch, ...]] = ContextVar("graftlm_kernel_watches", default=())


@contextmanager
def watching(watch: KernelWatch) -> Iterator[KernelWatch]:
    """Activate a watch in the context, for kernels that this thread or task uses."""
    token = _watches.set((*_watches.get(), watch))
    try:
        yield watch
    finally:
        _watches.reset(token)


@contextmanager
def kernels_reported(*, on_terminal: bool) -> Iterator[None]:
    """Report at the end of the context which kernels are used, were compiled or are missing.

    Missing kernels are reported once: on the terminal if an active watch shows lines there, else as a warning in the
    log.

    Args:
        on_terminal: whether lines are printed to a terminal if no active watch shows lines.
    """
    is_shown = any(watch.say is not None for watch in _watches.get())
    shows_terminal = on_terminal and not is_shown and sys.stderr.isatty()
    with watching(KernelWatch(print_line if shows_terminal else None)) as watch:
        yield
        if report := watch.report():
            _logger.info("%s", report)
            say(report)
        if summary := watch.summary():
            _logger.info("%s", summary)
        if complaint := watch.complaint():
            # INFO if the line is shown on the terminal, because Python's default log also writes warnings to the
            # terminal.
            _logger.log(logging.INFO if is_shown or shows_terminal else logging.WARNING, "%s", complaint)
            say(f"warning: {complaint}")


def print_line(line: str) -> None:
    """Write a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """Pass a line to every active watch that shows lines."""
    for watch in _watches.get():
        if watch.say is not None:
            watch.say(line)


def kernel_used(use: KernelUse) -> None:
    """Record the use of a kernel in every active watch."""
    for watch in _watches.get():
        watch.uses.append(use)


def kernel_refused(name: str, reason: str) -> None:
    """Record in every active watch that a kernel is not available."""
    for watch in _watches.get():
        watch.refused[name] = reason
