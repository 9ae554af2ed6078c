"""The one thread in which the programs of a process wait for their backends."""

import asyncio
import threading
from functools import cache

__all__ = ["is_in_shared_loop", "shared_loop"]


@cache
def _start() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="graftlm-lang", daemon=True).start()
    return loop


_starting = threading.Lock()


def shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, running; it starts when a program first runs.

    A state that waits for tokens is a suspended coroutine here: thousands of them cost one thread.
    """
    with _starting:
        return _start()


def is_in_shared_loop() -> bool:
    """Whether the calling code runs in that very loop, and so must not wait for it."""
    try:
        return asyncio.get_running_loop() is shared_loop()
    except RuntimeError:  # in no loop at all
        return False
