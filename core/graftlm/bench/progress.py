"""The progress bar of a run, on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graftlm.bench.load import LoadObserver
from graftlm.bench.records import RequestRecord

__all__ = ["load_progress"]

#: Number of updates per second. It is low, because each update delays the client and so increases measured latencies.
_REFRESHES_PER_S = 2


@contextmanager
def load_progress(num_requests: int, console: Console) -> Iterator[LoadObserver]:
    """Show the progress of a run on a terminal; nothing if the console is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[sent]} sent, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, refresh_per_second=_REFRESHES_PER_S, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("requests", total=num_requests, sent=0, failed=0)
        num_sent = num_failed = 0

        def sent() -> None:
            nonlocal num_sent
            num_sent += 1
            progress.update(task, sent=num_sent)

        def ended(record: RequestRecord) -> None:
            nonlocal num_failed
            num_failed += record.failure is not None
            progress.update(task, advance=1, failed=num_failed)

        yield LoadObserver(sent, ended)
