"""Errors are raised when a value is read, with the program's line, and do not affect other programs."""

import asyncio
import contextlib
import inspect

import pytest

from graftlm import RuntimeEndpoint, function, gen, select, set_default_backend, user
from graftlm.errors import (
    ConfigError,
    ProgramError,
    RequestError,
    SamplingParamsError,
    TraceError,
    UnavailableError,
    UnsupportedFeatureError,
)


def line_of(program, text):
    """Return the number of the program's line that contains a text."""
    lines, first = inspect.getsourcelines(program.__wrapped__)
    return next(first + i for i, line in enumerate(lines) if text in line)


def test_a_read_raises_with_file_and_line(backend):
    @function
    def program(s):
        s += "1 + 1 ="
        s += gen("good", max_tokens=2)
        s += gen("bad", temperature=-1.0)  # this line
        s += gen("behind", max_tokens=2)
        assert s["good"]
        for name in ("bad", "behind"):
            with pytest.raises(ProgramError, match="temperature") as caught:
                s[name]
            assert caught.value.filename == __file__
            assert caught.value.lineno == line_of(program, "# this line")
            assert "in program" in str(caught.value)
            assert isinstance(caught.value.__cause__, RequestError)
        with pytest.raises(ProgramError, match="temperature"):
            s.text()
        return s.error()

    with pytest.raises(ProgramError, match="temperature") as caught:
        program.run(backend=backend).text()
    assert caught.value.lineno == line_of(program, "# this line")


def test_the_cause_is_the_error_of_the_backend(in_process):
    with pytest.raises(ProgramError) as caught:
        function(lambda s: s.__iadd__("a" + gen("x", top_p=3.0))).run(backend=in_process).text()
    assert isinstance(caught.value.__cause__, SamplingParamsError)


def test_the_line_is_that_of_the_helper_that_appended(backend):
    def helper(s):
        with s.user():
            s += gen("x", temperature=-1.0)  # here

    @function
    def program(s):
        helper(s)

    with pytest.raises(ProgramError) as caught:
        program.run(backend=backend).text()
    lines, first = inspect.getsourcelines(helper)
    assert caught.value.lineno == first + next(i for i, line in enumerate(lines) if "# here" in line)


def test_a_failed_fork_does_not_affect_its_siblings(backend):
    @function
    def program(s):
        s += "1 + 1 ="
        bad, good = s.fork(2)
        bad += gen("x", temperature=-1.0)
        good += gen("x", max_tokens=2)
        with pytest.raises(ProgramError):
            bad["x"]
        return good["x"]

    assert program.run(backend=backend, temperature=0).ret_value


def test_an_unknown_variable_is_a_key_error_that_lists_the_others(backend):
    @function
    def program(s):
        s += "1 + 1 =" + gen("sum", max_tokens=2)
        return s["total"]

    with pytest.raises(KeyError, match=r"no variable 'total'.*sum"):
        program.run(backend=backend)


def test_the_programs_own_error_is_raised_unchanged(backend):
    @function
    def program(s):
        s += "a" + gen("x", max_tokens=4000, ignore_eos=True)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        program.run(backend=backend)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda s: s.__iadd__(3), "takes text and expressions"),
        (lambda s: s.__iadd__(None), "takes text and expressions"),
    ],
)
def test_an_invalid_expression_is_refused_at_once(write, says, in_process):
    with pytest.raises(RequestError, match=says):
        function(write).run(backend=in_process)


def test_messages_cannot_be_nested(in_process):
    @function
    def program(s):
        with s.user():
            s += user("Hi")

    with pytest.raises(ProgramError, match="a message of user is open"):
        program.run(backend=in_process).text()


def test_a_program_needs_a_backend_and_an_argument():
    with pytest.raises(ConfigError, match="set_default_backend"):
        function(lambda s: None).run()
    with pytest.raises(ConfigError, match="a backend is an Engine"):
        set_default_backend("http://127.0.0.1")
    with pytest.raises(RequestError, match="first argument"):
        function(lambda: None)


def test_the_default_backend_runs_programs_without_a_backend(engine):
    set_default_backend(engine)
    try:
        assert function(lambda s: s.__iadd__("1 + 1 =" + gen("x", max_tokens=2))).run(temperature=0)["x"]
    finally:
        set_default_backend(None)


def test_an_unreachable_server_is_reported():
    @function
    def program(s):
        s += "a" + gen("x")

    with (
        RuntimeEndpoint("http://127.0.0.1:9") as nobody,
        pytest.raises(ProgramError, match=r"127\.0\.0\.1:9") as caught,
    ):
        program.run(backend=nobody).text()
    assert isinstance(caught.value.__cause__, UnavailableError)


def test_unknown_chat_templates_are_refused(server):
    with pytest.raises(ConfigError, match="the names are chatml"):
        RuntimeEndpoint(server.url, chat_template="chatmI")


def test_a_select_on_a_backend_without_logprobs_is_an_error():
    class NoLogprobs:
        async def generate(self, request): ...
        def stream(self, request): ...
        async def cache_prefix(self, prompt): ...
        async def chat_template(self): ...
        async def flush_cache(self): ...
        async def score(self, prompt, choices, *, unconditional, messages):
            raise UnsupportedFeatureError("this backend has no log-probabilities")

    with pytest.raises(ProgramError, match="no log-probabilities"):
        function(lambda s: s.__iadd__("a" + select("x", ["b"]))).run(backend=NoLogprobs()).text()


def read_in_scope(s):
    return s["v"]


def read_meta_info(s):
    return s.get_meta_info("v")


def follow(s):
    return list(s.text_iter("v"))


def read_in_fork(s):
    return s.fork(1)[0]["v"]


@pytest.mark.parametrize("read", [read_in_scope, read_meta_info, follow, read_in_fork])
def test_a_scope_cannot_be_read_before_its_end(read, in_process):
    @function
    def program(s):
        with s.var_scope("v"):  # opened
            s += "abc"
            with pytest.raises(RequestError, match="scope 'v' is still open") as caught:
                read(s)
        assert f"line {line_of(program, '# opened')}," in str(caught.value)
        return s["v"]

    assert program.run(backend=in_process).ret_value == "abc"


def test_a_trace_refuses_to_read_an_open_scope():
    @function
    def program(s):
        with s.var_scope("v"):
            s += "abc"
            s += s["v"]

    with pytest.raises(TraceError, match="scope 'v' is still open"):
        program.compile()


def test_a_scope_left_by_an_exception_has_the_text_so_far(in_process):
    @function
    def program(s):
        with contextlib.suppress(LookupError), s.var_scope("v"):
            s += "abc"
            raise LookupError
        return s["v"]

    assert program.run(backend=in_process).ret_value == "abc"


@function
def raises_before_its_gen(s):
    s += "The capital is"
    int("boom")  # raises
    s += gen("city")


async def follow_in_loop(state):
    return [chunk async for chunk in state.text_async_iter("city")]


@pytest.mark.parametrize(
    "read",
    [
        lambda state: state["city"],
        lambda state: state.get_meta_info("city"),
        lambda state: list(state.text_iter("city")),
        lambda state: asyncio.run(follow_in_loop(state)),
        lambda state: state.ret_value,
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_read_of_a_run_raises_its_functions_error(read, stream, in_process):
    if stream:
        state = raises_before_its_gen.run(backend=in_process, stream=True)
    else:
        (state,) = raises_before_its_gen.run_batch([{}], backend=in_process)
    with pytest.raises(ProgramError, match=r"function raised ValueError: invalid literal.*\n  File") as caught:
        read(state)
    assert isinstance(caught.value.__cause__, ValueError)
    assert (caught.value.filename, caught.value.lineno) == (__file__, line_of(raises_before_its_gen, "# raises"))


def test_the_returned_value_of_a_failed_state_raises(in_process):
    @function
    def program(s):
        s += "a" + gen("bad", temperature=-1.0)
        return "fine"

    (state,) = program.run_batch([{}], backend=in_process)
    with pytest.raises(ProgramError, match="temperature"):
        assert state.ret_value


async def is_coroutine(s): ...


def is_generator(s):
    yield


async def is_both(s):
    yield


@pytest.mark.parametrize("func", [is_coroutine, is_generator, is_both])
def test_functions_whose_call_runs_no_code_are_refused(func):
    with pytest.raises(RequestError, match=f"{func.__name__}.. is a.*, so a call does not run its body"):
        function(func)


@pytest.mark.parametrize("runs", [{"word": "a"}, "abc", b"abc", 5, None])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_batch_must_be_a_list_of_runs(runs, is_compiled, in_process):
    @function
    def program(s, word):
        s += word

    with pytest.raises(RequestError, match=f"the arguments of each run, got {type(runs).__name__}"):
        (program.compile() if is_compiled else program).run_batch(runs, backend=in_process)


def test_a_class_is_refused_as_a_backend():
    with pytest.raises(ConfigError, match=r"got the class RuntimeEndpoint; write RuntimeEndpoint\(...\)"):
        set_default_backend(RuntimeEndpoint)
