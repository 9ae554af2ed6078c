"""The thread in which the programs of a process wait for their backends."""

import asyncio
import os
import selectors
import sys
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

__all__ = ["is_in_shared_loop", "shared_loop", "wait_in_shared_loop"]

T = TypeVar("T")


_STOP_TIMEOUT_S: Final = 1.0


class _LoopOfProcess:
    """Starts this process's event loop at its first use.

    A forked process has a copy of its parent's loop, but not the thread that runs the loop. The process therefore
    starts a new loop.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._started: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._inherited: list[asyncio.AbstractEventLoop] = []  # loops of the ancestors that forked this process

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; the first call starts it."""
        with self._starting:
            if self._started is None:
                self._started = self._start()
            return self._started[0]

    def stop(self) -> None:
        """Stop the thread at the end of the process, because a thread may crash the interpreter's shutdown."""
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
            os.register_at_fork(after_in_child=lambda: self._abandon(loop, selector))
        return loop, thread

    def _abandon(self, loop: asyncio.AbstractEventLoop, selector: selectors.BaseSelector) -> None:
        """Detach from the parent's loop, in a process that has just been forked."""
        if loop in self._inherited:  # the parent is itself a forked process, and has detached from this loop already
            return
        self._starting, self._started = threading.Lock(), None  # another thread of the parent may have held the lock
        self._inherited.append(loop)
        loop.set_exception_handler(lambda loop, context: None)  # the parent closes the open connections
        if sys.platform == "linux" and isinstance(selector, selectors.EpollSelector):
            # Both processes share one epoll object: if the child unregistered a file, the parent would lose it too.
            with selectors.EpollSelector() as own:
                os.dup2(own.fileno(), selector.fileno(), inheritable=False)


_loop_of_process: Final = _LoopOfProcess()

#: Created before all other finalizers that need the loop. At the end of the process, finalizers are called in reverse
#: order of their creation, so this one is called last.
_stopper: Final = weakref.finalize(_LoopOfProcess, _loop_of_process.stop)


def shared_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop of this process; the first call starts it.

    A state that waits for tokens is a suspended coroutine in this loop, so thousands of states need one thread.
    """
    return _loop_of_process.get()


def wait_in_shared_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the shared loop and wait for its result. Must not be called in this loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, shared_loop()).result()


def is_in_shared_loop() -> bool:
    """Whether the calling code runs in the shared loop and therefore must not wait for it."""
    try:
        return asyncio.get_running_loop() is shared_loop()
    except RuntimeError:  # the calling thread runs no loop
        return False
