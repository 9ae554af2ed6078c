"""Many runs of one program, a bounded number of them at a time."""

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

#: States under way at most. They wait in the event loop, so this bounds memory, not threads.
_MAX_UNDER_WAY: Final = 2048


def as_runs(batch_kwargs: Any) -> list[Any]:
    """Return the entries of a batch.

    Raises:
        RequestError: it is no list of them, but for example the arguments of one run.
    """
    if isinstance(batch_kwargs, Mapping | str | bytes) or not isinstance(batch_kwargs, Iterable):
        raise RequestError(
            f"run_batch takes a list with the arguments of each run, got {type(batch_kwargs).__name__}; write "
            "run_batch([...]) around those of one run"
        )
    return list(batch_kwargs)


def run_batch(
    start: Callable[[T], tuple[ProgramState, Callable[[], "Future[None]"]]],
    runs: Sequence[T],
    num_threads: int | str,
    shows_progress: bool,
) -> Iterator[ProgramState]:
    """Yield the states of many runs, in order, each when it is done. Leaving early cancels those under way.

    Args:
        start: from what tells one run from another to its empty state and the call that runs the program on it.
        num_threads: that run these calls; "auto" for as many as may well sleep at a time.

    Raises:
        RequestError: `num_threads` is neither.
    """
    threads = _num_threads(num_threads)
    return _states(start, runs, threads, shows_progress)


def _states(
    start: Callable[[T], tuple[ProgramState, Callable[[], "Future[None]"]]],
    runs: Sequence[T],
    num_threads: int,
    shows_progress: bool,
) -> Iterator[ProgramState]:
    under_way: deque[tuple[ProgramState, Future[Future[None]]]] = deque()
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="graftlm-program")
    waiting = iter(runs)
    try:
        with progress_bar(len(runs), shows_progress, "running") as advance:
            while True:
                for run in waiting:
                    state, call = start(run)
                    under_way.append((state, pool.submit(call)))
                    if len(under_way) >= _MAX_UNDER_WAY:
                        break
                if not under_way:
                    return
                state, called = under_way[0]
                called.result().exception()  # only waits: an error is found by who reads the state
                under_way.popleft()
                advance()
                yield state
                del state
    finally:
        for state, _ in under_way:
            state.cancel()
        pool.shutdown(wait=not under_way, cancel_futures=True)


def _num_threads(wanted: int | str) -> int:
    if wanted == "auto":
        return max(64, 16 * (os.cpu_count() or 1))
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise RequestError(f'num_threads must be at least 1, or "auto", got {wanted!r}')
    return wanted
