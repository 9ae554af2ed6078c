"""Forks run in parallel from one prefix, which is computed once."""

import gc
import threading

import pytest
import requests

from graftlm import assistant, flush_cache, function, gen, set_default_backend, user, user_begin, user_end
from graftlm.errors import ProgramCancelledError, ProgramError, RequestError
from graftlm.testing.server_process import wait_until

PREFIX = "The capital of France is Paris. The day after Monday is Tuesday. " * 58
NUM_FORKS = 8


def full_page_tokens(engine, backend, prefix):
    page_size = engine.config.cache.page_size if type(backend).__name__ == "EngineBackend" else 1
    return len(engine.tokenizer.encode(prefix)) // page_size * page_size


def test_forks_that_start_together_reuse_all_full_pages_of_the_prefix(engine, backend):
    flush_cache(backend)
    least = full_page_tokens(engine, backend, PREFIX)
    assert least >= 1000

    @function
    def program(s):
        s += PREFIX
        forks = s.fork(NUM_FORKS)
        forks += lambda i: f"{i} + 1 =" + gen("answer", max_tokens=4)
        return [fork.get_meta_info("answer")["cached_tokens"] for fork in forks]

    cached = program.run(backend=backend, temperature=0).ret_value
    assert len(cached) == NUM_FORKS
    assert min(cached) >= least


def test_forks_that_start_together_share_equal_text_after_the_fork(engine, backend):
    flush_cache(backend)
    least = full_page_tokens(engine, backend, PREFIX)

    @function
    def program(s):
        forks = s.fork(NUM_FORKS)  # the state is empty, so no hint is sent
        forks += lambda i: PREFIX + f"{i} + 1 =" + gen("answer", max_tokens=4)
        return [fork.get_meta_info("answer")["cached_tokens"] for fork in forks]

    first, *others = sorted(program.run(backend=backend, temperature=0).ret_value)
    assert first == 0
    assert len(others) == NUM_FORKS - 1
    assert min(others) >= least


def test_runs_of_a_batch_share_their_prefix_without_a_fork(engine, backend):
    flush_cache(backend)
    least = full_page_tokens(engine, backend, PREFIX)
    program = function(lambda s, i: s.__iadd__(PREFIX + f"{i} + 1 =" + gen("answer", max_tokens=4)))
    states = program.run_batch([{"i": i} for i in range(NUM_FORKS)], backend=backend, temperature=0)
    first, *others = sorted(state.get_meta_info("answer")["cached_tokens"] for state in states)
    assert first == 0
    assert min(others) >= least


def test_a_fork_computes_its_prefix_once_and_unlocks_it(engine, in_process):
    @function
    def program(s):
        s += PREFIX
        forks = s.fork(NUM_FORKS)
        forks += lambda i: f"{i} + 1 =" + gen("answer", max_tokens=4)
        forks[0].sync()
        forks[0] += gen("cancelled", max_tokens=1000, ignore_eos=True)
        forks[0].cancel()
        return [fork.get_meta_info("answer") for fork in forks[1:]]

    flush_cache(in_process)
    before = engine.stats()
    metas = program.run(backend=in_process, temperature=0).ret_value
    wait_until(lambda: engine.stats().running_requests == 0)
    after = engine.stats()
    least = full_page_tokens(engine, in_process, PREFIX)
    num_own = max(meta["prompt_tokens"] for meta in metas) - least
    computed = after.prompt_tokens - before.prompt_tokens - (after.cached_tokens - before.cached_tokens)
    assert computed <= len(engine.tokenizer.encode(PREFIX)) + (NUM_FORKS + 1) * (num_own + 4)
    assert after.locked_pages == after.owned_pages == 0
    assert engine.flush_cache() >= least


def test_the_forks_of_a_server_hold_no_memory_after_their_end(server, endpoint):
    @function
    def program(s):
        s += PREFIX
        forks = s.fork(NUM_FORKS)
        forks += lambda i: f"{i} + 1 =" + gen("answer", max_tokens=4)
        forks.join()

    def load():
        return requests.get(f"{server.url}/get_load", timeout=10).json()[0]

    program.run(backend=endpoint, temperature=0)
    wait_until(lambda: load()["num_reqs"] == load()["num_pages"] == 0, 10.0, "the release of all pages")
    assert load()["num_cached_pages"] >= 1000  # pages of one token each; the prefix stays cached for others


def test_a_prefix_of_an_earlier_gen_is_not_computed_again(engine, in_process):
    @function
    def program(s):
        s += PREFIX + gen("first", max_tokens=4)
        forks = s.fork(2)
        forks += " So" + gen("x", max_tokens=2)
        forks.join()

    before = engine.stats().finished_requests
    program.run(backend=in_process, temperature=0)
    assert engine.stats().finished_requests - before == 3  # no hint


def test_join_gathers_new_variables(backend):
    @function
    def program(s):
        s["old"] = 1
        s += "Count: "
        with s.fork(3) as forks:
            forks += [f"{i}" + gen("next", max_tokens=2) for i in range(3)]
            expected = [fork["next"] for fork in forks]
        assert s["next"] == expected
        assert s["old"] == 1
        s += "|".join(s["next"])

    text = program.run(backend=backend, temperature=0).text()
    assert text.startswith("Count: ")
    assert text.count("|") == 2


def test_a_fork_can_be_appended_to_by_its_index(in_process):
    @function
    def program(s):
        s += "a"
        forks = s.fork(2)
        forks[1] += "b"
        with pytest.raises(RequestError, match="cannot be replaced"):
            forks[0] = forks[1]
        return [fork.text() for fork in forks]

    assert program.run(backend=in_process).ret_value == ["a", "ab"]


def test_a_fork_has_the_parents_text_chat_and_variables(backend):
    @function
    def program(s):
        s.user("Hi")
        s["a"] = 1
        (child,) = s.fork()
        s += "parent"
        child += "child"
        assert child["a"] == 1
        child["a"] = 2
        assert s["a"] == 1
        assert child.messages() == s.messages()
        assert child.text() == s.text().removesuffix("parent") + "child"

    program.run(backend=backend)


def test_a_copy_does_not_change_the_original_text(backend):
    @function
    def program(s):
        s += "1 + 1 ="
        with s.copy() as other:
            other += gen("guess", max_tokens=3)
        s += " unknown"

    state = program.run(backend=backend, temperature=0)
    assert state.text() == "1 + 1 = unknown"
    assert len(state["guess"]) == 1


def test_a_fork_outlives_its_unreferenced_parent(backend):
    @function
    def program(s):
        s += "1 + 1 ="
        child = s.fork(1)[0]
        child += gen("x", max_tokens=3)
        grandchild = child.fork(1)[0]
        del child
        gc.collect()
        grandchild += gen("y", max_tokens=3)
        return grandchild["x"], grandchild["y"]

    x, y = program.run(backend=backend, temperature=0).ret_value
    assert x
    assert y is not None


@pytest.mark.parametrize("size", [0, -1])
def test_a_fork_needs_at_least_one_state(size, in_process):
    with pytest.raises(RequestError, match="at least 1"):
        function(lambda s: s.fork(size)).run(backend=in_process)


def test_a_list_needs_one_expression_for_each_fork(in_process):
    @function
    def program(s):
        forks = s.fork(2)
        forks += ["a"]

    with pytest.raises(RequestError, match="got 1 expressions for 2 forks"):
        program.run(backend=in_process)


def test_an_error_before_a_fork_is_raised_in_the_forks(backend):
    @function
    def program(s):
        s += "x" + gen("bad", temperature=-1.0)
        return s.fork(2)[1].text()

    with pytest.raises(ProgramError, match="temperature") as caught:
        program.run(backend=backend)
    assert caught.value.lineno == program.__wrapped__.__code__.co_firstlineno + 2


def test_thousands_of_states_need_no_additional_threads(in_process):
    set_default_backend(in_process)
    try:

        @function
        def program(s):
            forks = s.fork(2000)
            forks += lambda i: str(i)
            before = threading.active_count()
            return [fork.text() for fork in forks], before

        texts, num_threads = program.run().ret_value
    finally:
        set_default_backend(None)
    assert texts == [str(i) for i in range(2000)]
    assert num_threads < 40


def test_forks_left_by_an_error_are_cancelled_and_the_program_continues(in_process):
    @function
    def program(s):
        s += "Once upon a time"
        forks = s.fork(2)
        try:
            with forks:
                forks += gen("x", max_tokens=1900, ignore_eos=True)
                raise LookupError("mine")
        except LookupError:
            s += " there was" + gen("y", max_tokens=2)
        with pytest.raises(ProgramCancelledError):
            forks[0]["x"]
        return "x" in s, s["y"]

    has_x, y = program.run(backend=in_process, temperature=0).ret_value
    assert not has_x
    assert y


@pytest.mark.parametrize("size", ["x", 0, -1, None, 1.5])
def test_the_size_of_a_fork_must_be_a_positive_number(size, in_process):
    with pytest.raises(RequestError, match="fork needs the number of states, at least 1, got"):
        function(lambda s: s.fork(size)).run(backend=in_process)


def test_join_gathers_only_variables_by_default(in_process):
    @function
    def program(s, mode):
        forks = s.fork(2)
        forks += lambda i: f"{i} + 1 =" + gen("answer", max_tokens=2)
        forks.join(mode)
        return s["answer"]

    assert len(program.run("gather_variable", backend=in_process).ret_value) == 2
    with pytest.raises(RequestError, match="'gather_variable' or 'concate_and_append', got 'other'"):
        program.run("other", backend=in_process)


def append_texts(s):
    s += "Sums:"
    forks = s.fork(2)
    forks += lambda i: f" {i} + 1 =" + gen("answer", max_tokens=2)
    s += " (done)"
    forks.join("concate_and_append")
    texts = [fork.text().removeprefix("Sums:") for fork in forks]
    s += gen("end", max_tokens=2)
    return "Sums: (done)" + texts[0] + texts[1]


def append_messages(s):
    s += user("Two sums.")
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += user(f"{i} + 1?") + assistant(gen("answer", max_tokens=4))
    forks.join("concate_and_append")
    s += user("Which is more?")
    return [*s["answer"]]


def append_within_a_message(s):
    s += user("Two sums.")
    with s.assistant():
        forks = s.fork(2)
        forks += lambda i: f"{i} + 1 =" + gen("answer", max_tokens=2) + ". "
        forks.join("concate_and_append")
    return [*s["answer"]]


def test_a_join_appends_the_texts_of_forks_in_order(backend):
    state = function(append_texts).run(backend=backend, temperature=0)
    assert state.text() == state.ret_value + state["end"]
    assert len(state["answer"]) == 2


def test_a_join_appends_the_messages_of_forks(in_process):
    state = function(append_messages).run(backend=in_process, temperature=0)
    first, second = state.ret_value
    assert [(message["role"], message["content"]) for message in state.messages()] == [
        ("user", "Two sums."),
        ("user", "0 + 1?"),
        ("assistant", first),
        ("user", "1 + 1?"),
        ("assistant", second),
        ("user", "Which is more?"),
    ]


def test_a_join_appends_within_an_open_message(in_process):
    state = function(append_within_a_message).run(backend=in_process, temperature=0)
    first, second = state.ret_value
    assert state.messages()[-1]["content"] == f"0 + 1 ={first}. 1 + 1 ={second}. "


def open_one(fork):
    fork += user_begin() + "x"


def end_the_parents(fork):
    fork += user_end()


@pytest.mark.parametrize(
    ("write", "role", "places"),
    [
        (open_one, None, "began in no message and is joined in a message of user"),
        (end_the_parents, "user", "began in a message of user and is joined in no message"),
    ],
)
def test_a_fork_in_another_message_than_its_parent_cannot_be_appended(write, role, places, in_process):
    @function
    def program(s):
        s += "x" if role is None else user_begin()
        forks = s.fork(1)
        write(forks[0])
        forks.join("concate_and_append")

    with pytest.raises(ProgramError, match=places):
        program.run(backend=in_process)


def test_messages_cannot_be_appended_within_another(in_process):
    @function
    def program(s):
        forks = s.fork(1)
        forks += user("x")
        s += user_begin()
        forks.join("concate_and_append")

    with pytest.raises(ProgramError, match="a message of user is open"):
        program.run(backend=in_process).text()


@pytest.mark.parametrize("func", [append_messages, append_within_a_message])
def test_a_compiled_join_appends_the_same(func, in_process):
    expected = function(func).run(backend=in_process, temperature=0)
    state = function(func).compile().run(backend=in_process, temperature=0)
    assert state.text() == expected.text()
    assert state.messages() == expected.messages()
    assert state.ret_value == expected.ret_value


def test_a_compiled_join_appends_the_common_start_of_branches(in_process):
    @function
    def program(s):
        s += "Say:"
        forks = s.fork(2)
        forks += " The capital of France is a town in" + gen("answer", max_tokens=2)
        forks.join("concate_and_append")

    expected = program.run(backend=in_process, temperature=0)
    assert program.compile().run(backend=in_process, temperature=0).text() == expected.text()
