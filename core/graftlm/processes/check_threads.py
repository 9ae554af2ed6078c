"""Threads for what a plugin may never come back from."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, Final, TypeVar

from graftlm.errors import GrammarError, UnavailableError

__all__ = ["CheckThreads"]

T = TypeVar("T")

#: Calls that have been given up and still run, at most.
_MAX_STUCK: Final = 8


class CheckThreads:
    """Checks grammars beside the event loop, a few at once.

    A check that takes too long is given up: its thread goes on, but neither counts among the others nor keeps the
    process from ending. Used by one event loop.

    Args:
        timeout_s: how long a check may take, that of loading the backend included.
    """

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._turns = asyncio.Semaphore(num_threads)
        self._timeout_s = timeout_s
        self._num_stuck = 0

    async def run(self, check: Callable[[], T]) -> T:
        """Return what a call returns, which may raise.

        Raises:
            GrammarError: it takes too long.
            UnavailableError: too many others did, and run still.
        """
        if self._num_stuck >= _MAX_STUCK:
            raise UnavailableError(f"{self._num_stuck} checks of grammars hang in the grammar backend")
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        timer = loop.call_later(self._timeout_s, self._give_up, done)
        done.add_done_callback(lambda _: timer.cancel())
        done.add_done_callback(lambda _: self._turns.release())

        def work() -> None:
            try:
                result = check()
            except BaseException as error:  # whoever waits must hear of it
                tell = partial(self._end, done, error=error)
            else:
                tell = partial(self._end, done, result)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell)

        Thread(target=work, name="graftlm-grammar-check", daemon=True).start()
        return await asyncio.shield(done)  # whoever waits may go, the check takes its turn until it ends

    def _give_up(self, done: "asyncio.Future[T]") -> None:
        if done.done():  # just now
            return
        self._num_stuck += 1
        self._set_error(done, GrammarError(f"checking the grammar took longer than {self._timeout_s:g} s"))

    def _end(self, done: "asyncio.Future[T]", result: Any = None, error: BaseException | None = None) -> None:
        if done.done():
            self._num_stuck -= 1
        elif error is not None:
            self._set_error(done, error)
        else:
            done.set_result(result)

    @staticmethod
    def _set_error(done: "asyncio.Future[T]", error: BaseException) -> None:
        done.set_exception(error)
        done.exception()  # it counts as heard, though nobody may wait any more
