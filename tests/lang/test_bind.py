"""A bound program has some of its arguments, and the text that follows from them in the backend's cache."""

import pytest

from graftlm import assistant, function, gen, set_default_backend, system, user
from graftlm.errors import RequestError

NOTES = "The capital of France is Paris. The day after Monday is Tuesday. " * 4


@function
def ask(s, notes, question, max_words=8):
    s += system(notes) + user(f"{question} In {max_words} words.")
    s += assistant(gen("answer", max_tokens=4))
    if s["answer"] == "no":  # no trace goes past this line
        s += "?"


@pytest.fixture
def default(in_process, engine):
    engine.flush_cache()
    set_default_backend(in_process)
    yield in_process
    set_default_backend(None)


def test_it_says_the_same(in_process):
    whole = ask.run(NOTES, "What is 2 + 3?", temperature=0, backend=in_process)
    bound = ask.bind(notes=NOTES)
    assert bound.run("What is 2 + 3?", temperature=0, backend=in_process).text() == whole.text()
    assert bound.run(question="What is 2 + 3?", temperature=0, backend=in_process).text() == whole.text()
    again = bound.bind(max_words=8)
    assert again.run("What is 2 + 3?", temperature=0, backend=in_process).text() == whole.text()


def test_its_prefix_is_cached_when_it_is_made(default, engine):
    before = engine.stats().finished_requests
    bound = ask.bind(notes=NOTES)
    state = bound.run("What is 2 + 3?", temperature=0)
    assert engine.stats().finished_requests - before == 2  # the prefix, which the run came after, and the run
    assert state.get_meta_info("answer")["cached_tokens"] >= len(engine.tokenizer.encode(NOTES)) - 4


def test_its_prefix_is_cached_before_a_batch(engine):
    bound = ask.bind(notes=NOTES)
    engine.flush_cache()
    runs = [{"question": f"What is {i} + 3?"} for i in range(3)]
    states = bound.run_batch(runs, temperature=0, backend=engine)
    cached = [state.get_meta_info("answer")["cached_tokens"] for state in states]
    assert min(cached) >= len(engine.tokenizer.encode(NOTES)) - 4


def test_a_cached_prefix_is_not_asked_for_again(default, engine):
    bound = ask.bind(notes=NOTES)
    bound.run("What is 1 + 1?", temperature=0)  # comes after the prefix, which nobody else waits for
    before = engine.stats().finished_requests
    bound.run_batch([{"question": f"What is {i} + 3?"} for i in range(3)], temperature=0)
    assert engine.stats().finished_requests - before == 3


def test_a_short_prefix_is_not_worth_a_request(default, engine):
    before = engine.stats().finished_requests
    ask.bind(notes="Short.")
    assert engine.stats().finished_requests == before


def test_a_prefix_that_fails_leaves_that_to_the_runs(default):
    wrong = ask.bind(notes=5)  # the state takes no numbers
    with pytest.raises(RequestError, match="got int 5"):
        wrong.run("What is 2 + 3?")


def test_what_is_bound_is_no_argument_any_more(in_process):
    with pytest.raises(TypeError, match="notes"):
        ask.bind(notes=NOTES).run("What?", notes="Others.", backend=in_process)
    with pytest.raises(RequestError, match=r"ask\(\) has no argument topic; it has: notes, question, max_words"):
        ask.bind(topic="x")


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (lambda s, *words: None, r"\*words \(variadic positional\)"),
        (lambda s, **words: None, r"\*\*words \(variadic keyword\)"),
        (lambda s, word, /: None, r"word \(positional-only\)"),
        (lambda *words: None, r"\*words \(variadic positional\)"),
    ],
)
def test_arguments_without_a_name_are_refused(program, what):
    for use in (function(program).bind, function(program).trace, function(program).compile):
        with pytest.raises(RequestError, match=rf"cannot be bound, traced or compiled: {what} has no name"):
            use()


def test_a_state_by_place_only_and_arguments_by_name_only_are_bound(in_process):
    @function
    def say(s, /, word, *, other):
        s += f"{word} and {other}"

    assert say.bind(word="tea").run(other="cake", backend=in_process).text() == "tea and cake"
    assert say.compile(other="cake").run("tea", backend=in_process).text() == "tea and cake"


def test_it_compiles(in_process):
    @function
    def say(s, word, other):
        s += f"{word} and {other}" + gen("x", max_tokens=2)

    whole = say.run("tea", "cake", temperature=0, backend=in_process)
    compiled = say.bind(word="tea").compile()
    assert compiled.graph.arguments == ("other",)
    assert compiled.run("cake", temperature=0, backend=in_process).text() == whole.text()
