"""A progress bar for a list of prompts."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]

#: Minimum number of prompts for which a bar is shown on a terminal.
_PROGRESS_FROM = 16


@contextmanager
def progress_bar(total: int, wanted: bool | None, title: str = "generating") -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error. Yields: a function that advances the bar by one.

    Args:
        wanted: whether to show a bar; None: only on a terminal, for `_PROGRESS_FROM` or more prompts.
    """
    if not (total >= _PROGRESS_FROM and sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
