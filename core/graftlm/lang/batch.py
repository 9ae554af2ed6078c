"""Runs one program many times; a limited number of runs is active at the same time."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from graftlm.errors import RequestError
from graftlm.lang.state import ProgramState
from graftlm.progress import progress_bar

__all__ = ["as_runs", "run_batch"]

T = TypeVar("T")

#: Maximum number of active runs. An active run waits in the event loop and needs no thread, so this number limits
#: memory, not threads.
_MAX_ACTIVE_RUNS: Final = 2048


def as_runs(batch_kwargs: Any) -> list[Any]:
    """Return a batch as a list with one entry per run.

    Raises:
        RequestError: the value is not a list of entries; for example, it is the arguments of a single run.
    """
    if isinstance(batch_kwargs, Mapping | str | bytes) or not isinstance(batch_kwargs, Iterable):
        raise RequestError(
            f"run_batch takes a list with the arguments of each run, got {type(batch_kwargs).__name__}; put the "
            "arguments of a single run into a list"
        )
    return list(batch_kwargs)


def run_batch(
    start: Callable[[T], tuple[ProgramState, Callable[[], "Future[None]"]]],
    runs: Sequence[T],
    num_threads: int | str,
    shows_progress: bool,
) -> Iterator[ProgramState]:
    """Yield the states of many runs in order, each when it is finished. Closing the iterator cancels active runs.

    Args:
        start: function that creates a run from an entry of `runs`; returns the run's empty state, and a function that
            runs the program on this state.
        num_threads: number of threads that run programs; "auto": at least 64, because most of the threads only wait.

    Raises:
        RequestError: `num_threads` is neither "auto" nor a positive number.
    """
    threads = _num_threads(num_threads)
    return _states(start, runs, threads, shows_progress)


def _states(
    start: Callable[[T], tuple[ProgramState, Callable[[], "Future[None]"]]],
    runs: Sequence[T],
    num_threads: int,
    shows_progress: bool,
) -> Iterator[ProgramState]:
    active: deque[tuple[ProgramState, Future[Future[None]]]] = deque()
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="graftlm-program")
    waiting = iter(runs)
    try:
        with progress_bar(len(runs), shows_progress, "running") as advance:
            while True:
                for run in waiting:
                    state, call = start(run)
                    active.append((state, pool.submit(call)))
                    if len(active) >= _MAX_ACTIVE_RUNS:
                        break
                if not active:
                    return
                state, called = active[0]
                called.result().exception()  # only waits; later reads of the state raise the error
                active.popleft()
                advance()
                yield state
                del state
    finally:
        for state, _ in active:
            state.cancel()
        pool.shutdown(wait=not active, cancel_futures=True)


def _num_threads(number: int | str) -> int:
    if number == "auto":
        return max(64, 16 * (os.cpu_count() or 1))
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise RequestError(f'num_threads must be at least 1, or "auto", got {number!r}')
    return number
