"""Texts that are read while they grow."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from graftlm import function, gen, select, user
from graftlm.errors import ProgramError, RequestError
from graftlm.lang.variables import Cell, Variables


@function
def story(s):
    s += "Once upon a time" + gen("first", max_tokens=40, ignore_eos=True)  # a busy machine joins chunks
    s += " And then" + gen("second", max_tokens=40, ignore_eos=True)


def test_chunks_form_the_text(backend):
    state = story.run(backend=backend, temperature=0, stream=True)
    chunks = list(state.text_iter())
    whole = story.run(backend=backend, temperature=0)
    assert "".join(chunks) == state.text() == whole.text()
    assert len(chunks) > 4


@function
def long_story(s):
    s += "Once upon a time" + gen("first", max_tokens=4, ignore_eos=True)
    s += " And then" + gen("second", max_tokens=120, ignore_eos=True)


def test_a_variable_can_be_streamed_before_its_gen_is_appended(backend):
    state = long_story.run(backend=backend, temperature=0, stream=True)
    chunks = list(state.text_iter("second"))
    assert "".join(chunks) == state["second"]
    assert len(chunks) > 1
    assert state.get_meta_info("second")["completion_tokens"] == 120


async def test_text_can_be_streamed_in_an_event_loop(backend):
    state = story.run(backend=backend, temperature=0, stream=True)
    whole = "".join([chunk async for chunk in state.text_async_iter()])
    first = "".join([chunk async for chunk in state.text_async_iter("first")])
    assert whole == state.text()
    assert first == state["first"]


async def test_a_streamed_variable_has_its_meta_info(backend):
    state = story.run(backend=backend, temperature=0, stream=True)
    pairs = [pair async for pair in state.text_async_iter("second", return_meta_data=True)]
    assert "".join(text for text, _ in pairs) == state["second"]
    counts = [meta["completion_tokens"] for _, meta in pairs]
    assert counts == sorted(counts)
    assert all(text for text, _ in pairs)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_variable_in_one_piece_has_its_meta_info(stream, in_process):
    @function
    def program(s):
        s += "1 + 1 =" + gen("n", n=2, max_tokens=2) + select("c", [" a", " b"]) + gen("none", max_tokens=0)

    state = program.run(backend=in_process, stream=stream)
    for name, text in (("n", state["n"][0]), ("c", state["c"])):
        pairs = [pair async for pair in state.text_async_iter(name, return_meta_data=True)]
        assert "".join(piece for piece, _ in pairs) == text
        assert pairs[-1][1] == state.get_meta_info(name)
    assert [pair async for pair in state.text_async_iter("none", return_meta_data=True)] == []  # no piece is empty


async def test_a_whole_text_has_no_meta_info(in_process):
    state = story.run(backend=in_process)
    with pytest.raises(RequestError, match="needs the name of a variable"):
        await anext(state.text_async_iter(return_meta_data=True))


def test_a_text_can_be_streamed_twice_and_after_its_end(in_process):
    state = story.run(backend=in_process, temperature=0)
    assert "".join(state.text_iter()) == "".join(state.text_iter()) == state.text()
    assert "".join(state.text_iter("first")) == state["first"]


def test_several_completions_and_choices_are_streamed_in_one_piece(backend):
    @function
    def program(s):
        s += "1 + 1 =" + gen("n", n=2, max_tokens=2) + select("c", [" a", " b"])

    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter()) == state.text()
    assert list(state.text_iter("c")) == [state["c"]]
    assert len(state["n"]) == 2
    assert "".join(state.text_iter("n")) == state["n"][0]


def test_an_unknown_variable_is_a_key_error_after_the_programs_end(in_process):
    state = story.run(backend=in_process, stream=True)
    with pytest.raises(KeyError, match="no variable 'third'"):
        list(state.text_iter("third"))


@pytest.mark.parametrize("variable", [None, "bad"])
def test_an_error_is_raised_after_the_text_before_it(variable, backend):
    @function
    def program(s):
        s += "before" + gen("bad", temperature=-1.0)

    chunks = program.run(backend=backend, stream=True).text_iter(variable)
    if variable is None:
        assert next(chunks) == "before"
    with pytest.raises(ProgramError, match="temperature"):
        next(chunks)


def test_the_functions_own_error_is_raised_in_the_stream(in_process):
    @function
    def program(s):
        s += "before"
        raise LookupError("mine")

    with pytest.raises(ProgramError, match="LookupError: mine"):
        list(program.run(backend=in_process, stream=True).text_iter())


def test_a_chat_is_streamed(backend):
    @function
    def program(s):
        s += user("What is 2 + 3?")
        with s.assistant():
            s += gen("answer", max_tokens=8)

    state = program.run(backend=backend, temperature=0, stream=True)
    assert "".join(state.text_iter("answer")) == state.messages()[1]["content"]


def test_a_read_of_ret_value_waits_for_the_function(in_process):
    may_return = threading.Event()

    @function
    def program(s):
        may_return.wait(10.0)
        return "returned"

    state = program.run(backend=in_process, stream=True)
    threading.Timer(0.05, may_return.set).start()
    assert state.ret_value == "returned"


def test_a_program_cannot_read_its_own_ret_value(in_process):
    with pytest.raises(RequestError, match="cannot read its own ret_value"):
        function(lambda s: s.ret_value).run(backend=in_process)


def test_a_scope_left_by_an_exception_has_the_text_so_far(in_process):
    @function
    def program(s):
        with contextlib.suppress(LookupError), s.var_scope("v"):
            s += "abc"
            raise LookupError

    assert program.run(backend=in_process, stream=True)["v"] == "abc"


def test_waiting_for_a_variable_takes_no_thread_and_can_be_cancelled():
    variables = Variables(is_open=True)

    async def follow():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        waiting = [asyncio.create_task(variables.wait_for(name)) for name in ("a", "b", "never")]
        await asyncio.sleep(0)
        cells = variables["a"], variables["b"] = Cell(), Cell()
        assert tuple(await asyncio.gather(*waiting[:2])) == cells
        assert await variables.wait_for("a") is cells[0]
        waiting[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[2]

    asyncio.run(asyncio.wait_for(follow(), 10.0))  # that would wait for a thread that itself waits
