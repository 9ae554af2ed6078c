"""Requests that no state needs any more are aborted in the backend."""

import gc
import threading

import pytest

from graftlm import function, gen
from graftlm.errors import ProgramCancelledError
from graftlm.testing.server_process import wait_until


def endless(name):
    return gen(name, max_tokens=1900, ignore_eos=True)


@function
def long_program(s):
    s += "Once upon a time"
    s += endless("story")


@function
def long_forks(s):
    s += "Once upon a time"
    forks = s.fork(3)
    forks += endless("story")
    forks.join()


@pytest.fixture
def is_busy(num_requests):
    """Return a function that waits until requests run."""
    return lambda: wait_until(lambda: num_requests() > 0, 10.0, "a request")


@pytest.mark.parametrize("program", [long_program, long_forks])
@pytest.mark.parametrize("streams", [False, True])
def test_a_cancelled_run_leaves_no_request(program, streams, backend, is_busy, all_requests_end):
    state = program.run(backend=backend, temperature=0, stream=True)
    if streams:
        is_busy()
    state.cancel()
    all_requests_end()
    with pytest.raises(ProgramCancelledError):
        state.text()
    with pytest.raises(ProgramCancelledError):
        list(state.text_iter())


def test_an_unreferenced_state_leaves_no_request(backend, is_busy, all_requests_end):
    state = long_program.run(backend=backend, temperature=0, stream=True)
    is_busy()
    del state
    gc.collect()
    all_requests_end()


def test_an_abandoned_stream_and_state_leave_no_request(backend, all_requests_end):
    state = long_program.run(backend=backend, temperature=0, stream=True)
    for chunk in state.text_iter("story"):
        assert chunk
        break
    del state
    gc.collect()
    all_requests_end()


def test_a_fork_that_is_not_read_leaves_no_request(backend, all_requests_end):
    @function
    def program(s):
        s += "Once upon a time"
        s.fork(2).__iadd__(endless("story"))

    program.run(backend=backend, temperature=0)
    gc.collect()
    all_requests_end()


def test_a_program_that_raises_leaves_no_request(backend, all_requests_end):
    @function
    def program(s):
        s += "Once upon a time" + endless("story")
        raise LookupError

    with pytest.raises(LookupError):
        program.run(backend=backend)
    all_requests_end()


def test_an_abandoned_batch_leaves_no_request(backend, all_requests_end):
    @function
    def program(s, length):
        s += "Once upon a time" + gen("story", max_tokens=length, ignore_eos=True)

    states = program.run_batch([2] + [1900] * 20, num_threads=4, backend=backend, generator_style=True)
    assert next(states)["story"]
    states.close()
    gc.collect()
    all_requests_end()


def test_a_cancel_wakes_waiting_reads(backend):
    state = long_program.run(backend=backend, temperature=0, stream=True)
    caught = []

    def read():
        with pytest.raises(ProgramCancelledError):
            state["story"]
        caught.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    state.cancel()
    reader.join(10)
    assert caught


def test_a_cancelled_fork_does_not_affect_its_siblings(backend, all_requests_end):
    @function
    def program(s):
        s += "1 + 1 ="
        long, short = s.fork(2)
        long += endless("x")
        short += gen("x", max_tokens=3)
        long.cancel()
        with pytest.raises(ProgramCancelledError):
            long["x"]
        return short["x"]

    assert program.run(backend=backend, temperature=0).ret_value
    all_requests_end()


def test_a_finished_run_cannot_be_cancelled(backend):
    state = function(lambda s: s.__iadd__("1 + 1 =" + gen("sum", max_tokens=2))).run(backend=backend, temperature=0)
    state.cancel()
    assert state.text().endswith(state["sum"])
    assert state.error() is None
