"""The queue of one state's expressions, with forks, failures and cancellation."""

import asyncio
import sys
import threading
from concurrent.futures import Future

import pytest

from graftlm import function
from graftlm.errors import InvalidPromptError, ProgramCancelledError
from graftlm.lang import EngineBackend
from graftlm.lang.call_site import CallSite
from graftlm.lang.event_loop import shared_loop
from graftlm.lang.interpreter import Interpreter, RunContext
from graftlm.lang.sampling import Sampling
from graftlm.lang.steps import Later, Take

SITE = CallSite(__file__, 1, "program")
CANCELLED = ProgramCancelledError("cancelled")


def context(backend):
    return RunContext(backend, Sampling(), False, shared_loop())


def in_loop(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, shared_loop()).result(10.0)


@pytest.fixture
def loop_errors():
    """Collect the exceptions that the language's event loop reports."""
    errors = []
    shared_loop().set_exception_handler(lambda loop, context: errors.append(context))
    yield errors
    shared_loop().set_exception_handler(None)


@pytest.fixture
def eager_threads():
    """Make threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_forks_can_be_made_while_their_state_is_cancelled(in_process, loop_errors, eager_threads):
    parent = Interpreter(context(in_process))
    forks = parent.fork(2000, SITE)
    is_over = threading.Event()

    def fork():
        while not is_over.is_set():
            parent.fork(1, SITE)

    forking = threading.Thread(target=fork)
    forking.start()
    for _ in range(8):
        parent.fail(CANCELLED)
        in_loop(asyncio.sleep(0))
    is_over.set()
    forking.join()
    assert loop_errors == []
    assert all(fork.error is CANCELLED for fork in forks)


def test_a_fork_cancelled_before_its_start_does_not_wait_for_its_parent(in_process):
    async def never():
        await asyncio.Event().wait()

    parent = Interpreter(context(in_process))
    parent.submit(Later(never), SITE)
    (fork,) = parent.fork(1, SITE)
    fork.fail(CANCELLED)
    taken = Future()
    fork.submit(Take(taken), SITE)
    assert taken.exception(10.0) is CANCELLED
    assert parent.error is None
    parent.fail(CANCELLED)


def test_a_refused_hint_does_not_fail_the_program(engine):
    class Refusing(EngineBackend):
        num_hints = 0

        async def cache_prefix(self, prompt):
            self.num_hints += 1
            raise InvalidPromptError("too long")

    backend = Refusing(engine)
    program = function(lambda s: [fork.text() for fork in s.__iadd__("a" * 200).fork(2)])
    assert program.run(backend=backend).ret_value == ["a" * 200] * 2
    assert backend.num_hints == 1
