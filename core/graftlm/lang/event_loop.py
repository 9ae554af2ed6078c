"""The one thread in which the programs of a process wait for their backends."""

import asyncio
import threading
import weakref
from functools import cache
from typing import Final

__all__ = ["is_in_shared_loop", "shared_loop"]


_STOP_TIMEOUT_S: Final = 1.0


@cache
def _start() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="graftlm-lang", daemon=True)
    thread.start()
    return loop, thread


def _stop() -> None:
    """End the thread with the process: one that runs when the interpreter is gone aborts it in some library's code."""
    if _start.cache_info().currsize:
        loop, thread = _start()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_TIMEOUT_S)


#: Made before any other finalizer that needs the loop, and so called after them at the end of the process.
_stopper = weakref.finalize(_start, _stop)

_starting = threading.Lock()


def shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, running; it starts when a program first runs.

    A state that waits for tokens is a suspended coroutine here: thousands of them cost one thread.
    """
    with _starting:
        return _start()[0]


def is_in_shared_loop() -> bool:
    """Whether the calling code runs in that very loop, and so must not wait for it."""
    try:
        return asyncio.get_running_loop() is shared_loop()
    except RuntimeError:  # in no loop at all
        return False
