"""Threads for what a plugin may never come back from."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Final, TypeVar

from graftlm.errors import GrammarError, UnavailableError

__all__ = ["CheckThreads"]

T = TypeVar("T")

#: Checks that run at the same time, those that hang among them.
_MAX_THREADS: Final = 8
#: Longer than all but a few checks take, that of loading a backend aside.
_PATIENCE_S: Final = 1.0


class CheckThreads:
    """Checks grammars beside the event loop, a few at once. Used by one event loop.

    A check that is under way for longer than a second no longer counts among the few. One that takes too long is given
    up: its thread goes on, but does not keep the process from ending.

    Args:
        timeout_s: how long a check may take, that of loading the backend included, and how long it may wait for others.
    """

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._turns = asyncio.Semaphore(num_threads)
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self._timeout_s = timeout_s

    async def run(self, check: Callable[[], T]) -> T:
        """Return what a call returns, which may raise.

        Raises:
            GrammarError: it takes too long.
            UnavailableError: others take so long that it was not begun.
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
        return await asyncio.shield(self._start(check))  # whoever waits may go, the check takes its turn until it ends

    def _start(self, check: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        turn = loop.create_future()
        turn.add_done_callback(lambda _: self._turns.release())
        timers = (
            loop.call_later(min(_PATIENCE_S, self._timeout_s), _finish, turn, None, None),
            loop.call_later(self._timeout_s, _finish, done, None, self._too_long()),
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
            except BaseException as error:  # whoever waits must hear of it
                failure = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, result, failure)

        Thread(target=work, name="graftlm-grammar-check", daemon=True).start()
        return done

    def _too_long(self) -> GrammarError:
        return GrammarError(f"checking the grammar took longer than {self._timeout_s:g} s")


def _finish(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    """Set a future's result or error, unless it has one."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # it counts as heard, though nobody may wait any more
