"""The one thread in which the programs of a process wait for their backends."""

import asyncio
import os
import selectors
import sys
import threading
import weakref
from typing import Final

__all__ = ["is_in_shared_loop", "shared_loop"]


_STOP_TIMEOUT_S: Final = 1.0


class _LoopOfProcess:
    """Starts a process's event loop when it is first asked for.

    A process that is forked off has a copy of its parent's loop, without the thread that ran it, and starts its own.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._started: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._left: list[asyncio.AbstractEventLoop] = []  # of the processes that this one comes from

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the loop, running."""
        with self._starting:
            if self._started is None:
                self._started = self._start()
            return self._started[0]

    def stop(self) -> None:
        """End the thread with the process: one that runs when the interpreter is gone aborts it in library code."""
        if self._started is not None:
            loop, thread = self._started
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_STOP_TIMEOUT_S)

    def _start(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        selector = selectors.DefaultSelector()
        loop = asyncio.SelectorEventLoop(selector)
        thread = threading.Thread(target=loop.run_forever, name="graftlm-lang", daemon=True)
        thread.start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: self._leave(loop, selector))
        return loop, thread

    def _leave(self, loop: asyncio.AbstractEventLoop, selector: selectors.BaseSelector) -> None:
        """Forget the parent's loop, in a process that has just been forked off."""
        if loop in self._left:  # by the parent, when it was forked off itself
            return
        self._starting, self._started = threading.Lock(), None  # another thread may have held the lock
        self._left.append(loop)
        loop.set_exception_handler(lambda loop, context: None)  # connections left open here are closed by the parent
        if sys.platform == "linux" and isinstance(selector, selectors.EpollSelector):
            # Both processes have the same epoll: what the child unregistered would be lost to the parent.
            with selectors.EpollSelector() as own:
                os.dup2(own.fileno(), selector.fileno(), inheritable=False)


_loop_of_process: Final = _LoopOfProcess()

#: Made before any other finalizer that needs the loop, and so called after them at the end of the process.
_stopper: Final = weakref.finalize(_LoopOfProcess, _loop_of_process.stop)


def shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, running; it starts when a program first runs in this process.

    A state that waits for tokens is a suspended coroutine here: thousands of them cost one thread.
    """
    return _loop_of_process.get()


def is_in_shared_loop() -> bool:
    """Whether the calling code runs in that very loop, and so must not wait for it."""
    try:
        return asyncio.get_running_loop() is shared_loop()
    except RuntimeError:  # in no loop at all
        return False
