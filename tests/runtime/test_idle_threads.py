import os
import sys
import threading

import pytest

from graftlm.runtime.idle_threads import run_idle


def test_the_result_is_returned():
    assert run_idle(lambda: threading.current_thread() is not threading.main_thread()) is (sys.platform == "linux")


def test_exceptions_are_raised_in_the_caller():
    with pytest.raises(SystemExit, match="3"):
        run_idle(lambda: sys.exit(3))


@pytest.mark.skipif(sys.platform != "linux", reason="idle threads are Linux's")
def test_only_the_new_thread_has_idle_priority():
    assert run_idle(lambda: os.sched_getscheduler(threading.get_native_id())) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) != os.SCHED_IDLE
