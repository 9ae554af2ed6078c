"""Work that takes a core only while nothing else of the machine wants it."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

__all__ = ["run_idle"]

T = TypeVar("T")


def run_idle(call: Callable[[], T]) -> T:
    """Run a call on a thread that gives way to all others at once, and return what it returns.

    Only for calls into native code that lets go of the interpreter's lock and takes it again at the end: a thread that
    holds the lock and does not get a core keeps everybody waiting. A low priority (nice 19) is not enough beside steps
    that compute on all cores: their threads sleep and wake hundreds of times a step, and each time that such a thread
    wakes, Linux lets whoever has its core finish a turn of milliseconds, unless that is an idle thread.

    On systems without idle threads, the call is run here; where they are forbidden, on a thread like others.

    Raises:
        Exception: whatever the call raises.
    """
    if sys.platform != "linux":
        return call()
    done: Future[T] = Future()

    def work() -> None:
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        try:
            result = call()
        except BaseException as error:  # the caller's to handle
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=work, name="graftlm-idle", daemon=True).start()
    return done.result()
