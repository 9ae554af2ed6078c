"""Shows the progress of reading a checkpoint's weights, as a bar on a terminal or as messages for a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from graftlm.checkpoint.location import checkpoint_files

__all__ = ["watch_reading"]

_LARGE_BYTES = 1 << 30  # smaller checkpoints are read so fast that a message is not useful
_STEP_PERCENT = 20


@contextmanager
def watch_reading(
    path: Path,
    announce: Callable[[str], None] | None = None,
    *,
    terminal: TextIO | None = None,
    large_bytes: int = _LARGE_BYTES,
) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes of each read.

    Args:
        path: path of the checkpoint.
        announce: function that is called with messages such as "loading weights, 20 %"; None: a bar is shown if
            `terminal` is a terminal.
        terminal: stream for the bar; None: standard error.
        large_bytes: minimum size in bytes of checkpoints for which progress is shown.
    """
    stream = sys.stderr if terminal is None else terminal
    num_bytes = sum(file.stat().st_size for file in checkpoint_files(path))
    if num_bytes < large_bytes or (announce is None and not stream.isatty()):
        yield lambda read_bytes: None
    elif announce is not None:
        yield _Stages(num_bytes, announce).advance
    else:
        with _bar(num_bytes, stream) as advance:
            yield advance


class _Stages:
    """Announces each fifth of the progress once.

    Args:
        num_bytes: total number of bytes.
        announce: function that is called with each message.
    """

    def __init__(self, num_bytes: int, announce: Callable[[str], None]) -> None:
        self._num_bytes = num_bytes
        self._announce = announce
        self._read_bytes = 0
        self._next_percent = _STEP_PERCENT

    def advance(self, read_bytes: int) -> None:
        """Add a number of read bytes."""
        self._read_bytes += read_bytes
        percent = 100 * self._read_bytes // self._num_bytes
        if self._next_percent <= percent < 100:
            self._announce(f"loading weights, {percent} %")
            self._next_percent = percent - percent % _STEP_PERCENT + _STEP_PERCENT


@contextmanager
def _bar(num_bytes: int, stream: TextIO) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("loading weights", total=num_bytes)

        def advance(read_bytes: int) -> None:
            bar.advance(task, read_bytes)

        yield advance
