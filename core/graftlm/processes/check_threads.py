"""Threads for checks of grammars. A check may hang in a plugin."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Final, TypeVar

from graftlm.errors import GrammarError, UnavailableError

__all__ = ["CheckThreads"]

T = TypeVar("T")

#: Maximum number of checks that run at the same time, including those that hang.
_MAX_THREADS: Final = 8
#: Checks that have run for more than this number of seconds do not count towards `num_threads`. Nearly all checks take
#: less time, except the first check of a grammar backend, which includes loading the backend.
_MAX_TURN_S: Final = 1.0


class CheckThreads:
    """Checks grammars in threads. All methods are called in one event loop.

    There are two limits on concurrent checks. At most `num_threads` of them have run for less than 1 s, so a few slow
    checks do not delay other checks. At most 8 checks run in total, slow ones included.

    A check that exceeds its time limit fails. Its thread continues, but does not prevent the process from exiting.

    Args:
        num_threads: maximum number of concurrent checks that have run for less than 1 s.
        timeout_s: time limit of a check in seconds, including the loading of its grammar backend. The wait before the
            check starts has the same limit.
    """

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._turns = asyncio.Semaphore(num_threads)
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self._timeout_s = timeout_s

    async def run(self, check: Callable[[], T]) -> T:
        """Call `check` in a thread and return its result.

        Raises:
            GrammarError: the check exceeds its time limit.
            UnavailableError: the check could not start in time, because other checks hang.
            Exception: `check` raised this error.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._threads.acquire()
                try:
                    await self._turns.acquire()
                except BaseException:
                    self._threads.release()
                    raise
        except TimeoutError:
            raise UnavailableError(f"{_MAX_THREADS} checks of grammars hang in the grammar backend") from None
        return await asyncio.shield(self._start(check))  # the check continues if its caller is cancelled

    def _start(self, check: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        turn = loop.create_future()
        turn.add_done_callback(lambda _: self._turns.release())
        timers = (
            loop.call_later(min(_MAX_TURN_S, self._timeout_s), _finish, turn, None, None),
            loop.call_later(self._timeout_s, _finish, done, None, self._timeout_error()),
        )

        def end(result: Any, error: BaseException | None) -> None:
            for timer in timers:
                timer.cancel()
            _finish(turn, None, None)
            _finish(done, result, error)
            self._threads.release()

        def work() -> None:
            result, failure = None, None
            try:
                result = check()
            except BaseException as error:  # the waiting caller gets the error
                failure = error
            with suppress(RuntimeError):  # raised if the loop is closed
                loop.call_soon_threadsafe(end, result, failure)

        Thread(target=work, name="graftlm-grammar-check", daemon=True).start()
        return done

    def _timeout_error(self) -> GrammarError:
        return GrammarError(f"checking the grammar took longer than {self._timeout_s:g} s")


def _finish(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    """Set a future's result or error, unless it already has one."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # otherwise asyncio logs an error that no caller has retrieved
