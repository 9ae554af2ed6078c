"""Many runs of one program."""

import sys
import threading

import pytest

from graftlm import function, gen, select
from graftlm.errors import ProgramError, RequestError


@function
def add(s, a, b):
    s += f"{a} + {b} =" + gen("sum", max_tokens=3)


def test_200_programs_on_8_threads_equal_single_runs(backend):
    @function
    def read(s, a):
        s += f"{a} + 1 =" + gen("sum", max_tokens=2)
        return threading.current_thread().name, s["sum"]

    states = read.run_batch([{"a": a % 20} for a in range(200)], num_threads=8, temperature=0, backend=backend)
    names = {state.ret_value[0] for state in states}
    assert len(states) == 200
    assert len(names) <= 8
    alone = [read.run(a, temperature=0, backend=backend)["sum"] for a in range(20)]
    assert [state["sum"] for state in states] == alone * 10


def test_programs_that_only_append_need_one_thread(in_process, engine):
    states = add.run_batch([{"a": a, "b": 1} for a in range(64)], num_threads=1, backend=in_process, temperature=0)
    assert len({state.text() for state in states}) == 64


def test_a_plain_value_becomes_the_only_argument(in_process):
    @function
    def program(s, word):
        s += word

    states = program.run_batch(["a", "b"], backend=in_process)
    assert [state.text() for state in states] == ["a", "b"]
    with pytest.raises(RequestError, match="a mapping or a list of arguments for each run"):
        add.run_batch([1], backend=in_process)


def test_no_runs_return_no_states(in_process):
    assert add.run_batch([], backend=in_process) == []


def test_a_failed_run_raises_when_it_is_read_and_others_continue(backend):
    @function
    def program(s, temperature):
        s += "1 + 1 =" + gen("sum", max_tokens=2, temperature=temperature)
        if temperature == 2.0:
            raise LookupError("mine")

    good, bad, mine = program.run_batch([0.0, -1.0, 2.0], backend=backend)
    assert good["sum"]
    with pytest.raises(ProgramError, match="temperature"):
        bad["sum"]
    with pytest.raises(ProgramError, match="LookupError: mine"):
        mine["sum"]


def test_a_generator_yields_in_order(in_process):
    states = add.run_batch([{"a": a, "b": 2} for a in range(20)], generator_style=True, backend=in_process)
    assert [state.text().split(" +")[0] for state in states] == [str(a) for a in range(20)]


def test_a_progress_bar_shows_the_number_of_runs(in_process, capsys):
    add.run_batch([{"a": 1, "b": 1}] * 3, progress_bar=True, backend=in_process)
    assert "3/3" in capsys.readouterr().err


@pytest.mark.parametrize("num_threads", [0, "many", 1.5, True])
def test_the_number_of_threads_is_checked(num_threads, in_process):
    with pytest.raises(RequestError, match="num_threads"):
        add.run_batch([{"a": 1, "b": 1}], num_threads=num_threads, backend=in_process)


def test_more_programs_than_the_queue_holds_wait(narrow_engine):
    states = add.run_batch([{"a": a, "b": 1} for a in range(40)], backend=narrow_engine, temperature=0)
    assert all(state["sum"] for state in states)


def test_a_run_that_exits_fails_only_itself(in_process):
    @function
    def program(s, word):
        s += word
        if word == "bad":
            sys.exit(3)

    good, bad, other = program.run_batch(["good", "bad", "other"], backend=in_process)
    assert (good.text(), other.text()) == ("good", "other")
    with pytest.raises(ProgramError, match="SystemExit: 3"):
        bad.text()


def test_more_choices_than_the_queue_holds_are_scored_one_after_the_other(narrow_engine, in_process):
    @function
    def program(s):
        s += "1 + 1 =" + select("x", [" 1", " 2", " 3", " 4", " 5"])

    state = program.run(backend=narrow_engine)
    assert state["x"] == program.run(backend=in_process)["x"]
    assert len(state.get_meta_info("x")["normalized_prompt_logprobs"]) == 5


def test_more_completions_than_the_queue_holds_are_refused_at_once(narrow_engine):
    with pytest.raises(ProgramError, match="n=5: this engine's queue has room for 4"):
        function(lambda s: s.__iadd__("1 + 1 =" + gen("x", n=5))).run(backend=narrow_engine).text()
