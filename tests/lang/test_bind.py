"""A bound program has some arguments set, and the text that depends only on them is in the backend's cache."""

import pytest

from graftlm import assistant, function, gen, set_default_backend, system, user
from graftlm.errors import RequestError

NOTES = "The capital of France is Paris. The day after Monday is Tuesday. " * 4


@function
def ask(s, notes, question, max_words=8):
    s += system(notes) + user(f"{question} In {max_words} words.")
    s += assistant(gen("answer", max_tokens=4))
    if s["answer"] == "no":  # tracing stops at this line
        s += "?"


@pytest.fixture
def default(in_process, engine):
    engine.flush_cache()
    set_default_backend(in_process)
    yield in_process
    set_default_backend(None)


def test_a_bound_program_generates_the_same_text(in_process):
    whole = ask.run(NOTES, "What is 2 + 3?", temperature=0, backend=in_process)
    bound = ask.bind(notes=NOTES)
    assert bound.run("What is 2 + 3?", temperature=0, backend=in_process).text() == whole.text()
    assert bound.run(question="What is 2 + 3?", temperature=0, backend=in_process).text() == whole.text()
    again = bound.bind(max_words=8)
    assert again.run("What is 2 + 3?", temperature=0, backend=in_process).text() == whole.text()


def test_the_prefix_is_cached_when_the_program_is_bound(default, engine):
    before = engine.stats().finished_requests
    bound = ask.bind(notes=NOTES)
    state = bound.run("What is 2 + 3?", temperature=0)
    # the request for the prefix, which the run waited for, and the run
    assert engine.stats().finished_requests - before == 2
    assert state.get_meta_info("answer")["cached_tokens"] >= len(engine.tokenizer.encode(NOTES)) - 4


def test_the_prefix_is_cached_before_a_batch(engine):
    bound = ask.bind(notes=NOTES)
    engine.flush_cache()
    runs = [{"question": f"What is {i} + 3?"} for i in range(3)]
    states = bound.run_batch(runs, temperature=0, backend=engine)
    cached = [state.get_meta_info("answer")["cached_tokens"] for state in states]
    assert min(cached) >= len(engine.tokenizer.encode(NOTES)) - 4


def test_a_cached_prefix_is_not_requested_again(default, engine):
    bound = ask.bind(notes=NOTES)
    bound.run("What is 1 + 1?", temperature=0)  # runs after the prefix request, on whose result no other code waits
    before = engine.stats().finished_requests
    bound.run_batch([{"question": f"What is {i} + 3?"} for i in range(3)], temperature=0)
    assert engine.stats().finished_requests - before == 3


def test_a_short_prefix_is_not_requested(default, engine):
    before = engine.stats().finished_requests
    ask.bind(notes="Short.")
    assert engine.stats().finished_requests == before


def test_a_failure_of_the_prefix_is_reported_by_the_runs(default):
    wrong = ask.bind(notes=5)  # a state accepts no numbers
    with pytest.raises(RequestError, match="got int 5"):
        wrong.run("What is 2 + 3?")


def test_a_bound_argument_is_not_an_argument_any_more(in_process):
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
        with pytest.raises(RequestError, match=rf"traced or compiled: {what} cannot be passed by name"):
            use()


def test_positional_only_states_and_keyword_only_arguments_are_bound(in_process):
    @function
    def say(s, /, word, *, other):
        s += f"{word} and {other}"

    assert say.bind(word="tea").run(other="cake", backend=in_process).text() == "tea and cake"
    assert say.compile(other="cake").run("tea", backend=in_process).text() == "tea and cake"


def test_a_bound_program_can_be_compiled(in_process):
    @function
    def say(s, word, other):
        s += f"{word} and {other}" + gen("x", max_tokens=2)

    whole = say.run("tea", "cake", temperature=0, backend=in_process)
    compiled = say.bind(word="tea").compile()
    assert compiled.graph.arguments == ("other",)
    assert compiled.run("cake", temperature=0, backend=in_process).text() == whole.text()
