"""Runs calls with Linux's scheduling policy SCHED_IDLE, which uses a core only if no other thread needs it."""

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
    """Run a call on an idle-priority thread and return its result.

    The call must be native code that releases the GIL until its end: a thread that has the GIL but gets no core would
    block all other threads. A low priority (nice 19) is not enough. While steps compute on all cores, their threads
    sleep and wake hundreds of times per step. At each wake-up, Linux first lets the other thread on that core finish
    its time slice of milliseconds, unless that thread has the policy SCHED_IDLE.

    On systems without SCHED_IDLE, the call runs in this thread. If SCHED_IDLE is forbidden, it runs in a normal thread.

    Raises:
        Exception: any exception of the call.
    """
    if sys.platform != "linux":
        return call()
    done: Future[T] = Future()

    def work() -> None:
        with suppress(OSError):  # a sandbox may forbid this
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        try:
            result = call()
        except BaseException as error:  # re-raised in the caller
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=work, name="graftlm-idle", daemon=True).start()
    return done.result()
