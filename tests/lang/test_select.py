"""`select` against log-probabilities computed directly."""

from statistics import fmean

import pytest

from graftlm import (
    function,
    greedy_token_selection,
    select,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from graftlm.errors import ProgramError
from graftlm.lang import ChoiceScore, ChoicesMethod, Decision

PROMPT = "Question: What is the capital of France?\nAnswer: The capital of France is"
CHOICES = [" Paris", " Athens", " Lima, I think", " P"]
METHODS = [token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized]


def direct_logprobs(engine, token_ids):
    output = engine.generate([token_ids], {"max_tokens": 1, "prompt_logprobs": 0})[0]
    return [0.0 if t is None else t.logprob for t in output.prompt_logprobs]


def direct_scores(engine):
    """Return (given the prompt, without it) for each choice's tokens."""
    tokenizer = engine.tokenizer
    before = tokenizer.encode(PROMPT).tolist()
    scores = []
    for choice in CHOICES:
        whole = tokenizer.encode(PROMPT + choice).tolist()
        assert whole[: len(before)] == before
        own = whole[len(before) :]
        scores.append((direct_logprobs(engine, whole)[len(before) :], direct_logprobs(engine, own)))
    return scores


def pick(backend, method):
    @function
    def program(s):
        s += PROMPT
        s += select("choice", CHOICES, choices_method=method)

    return program.run(backend=backend)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_scores_equal_direct_computation(method, engine, backend):
    direct = direct_scores(engine)
    state = pick(backend, method)
    meta = state.get_meta_info("choice")
    given = [[p for p, *_ in row] for row in meta["input_token_logprobs"]]
    assert given == [pytest.approx(row, abs=1e-4) for row, _ in direct]
    if method is unconditional_likelihood_normalized:
        alone = [[p for p, *_ in row] for row in meta["unconditional_token_logprobs"]]
        assert alone == [pytest.approx(row, abs=1e-4) for _, row in direct]
        expected = [fmean(a - b for a, b in zip(*pair, strict=True)) for pair in direct]
    else:
        expected = [fmean(row) for row, _ in direct]
    assert meta["normalized_prompt_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert meta["choices_method"] == method.name
    assert state.text() == PROMPT + state["choice"]
    if method is not greedy_token_selection:
        assert state["choice"] == CHOICES[max(range(len(CHOICES)), key=expected.__getitem__)]
    else:
        firsts = [row[0] for row, _ in direct]
        assert state["choice"] in [c for c, p in zip(CHOICES, firsts, strict=True) if p == max(firsts)]


def scores(*rows, alone=None):
    alone = alone or [None] * len(rows)
    return [ChoiceScore(tuple(range(len(row))), row, a) for row, a in zip(rows, alone, strict=True)]


@pytest.mark.parametrize(
    ("method", "given", "index"),
    [
        (token_length_normalized, scores((-1.0, -1.0), (-3.0,)), 0),
        (token_length_normalized, scores((-1.0, -9.0), (-3.0,)), 1),
        (greedy_token_selection, scores((-1.0, -9.0), (-3.0,)), 0),
        (greedy_token_selection, scores((-1.0, -9.0), (-1.0, -2.0), (-2.0, 0.0)), 1),
        # The one that has ended goes on with its mean, -1, and loses to -0.5; or wins over -2.
        (greedy_token_selection, scores((-1.0,), (-1.0, -0.5)), 1),
        (greedy_token_selection, scores((-1.0,), (-1.0, -2.0)), 0),
        (greedy_token_selection, scores((-1.0,), (-1.0,)), 0),
        (unconditional_likelihood_normalized, scores((-2.0,), (-1.0,), alone=[(-9.0,), (-1.0,)]), 0),
        (unconditional_likelihood_normalized, scores((-2.0,), (-1.0,), alone=[(-2.0,), (-2.0,)]), 1),
    ],
)
def test_methods_decide(method, given, index):
    assert method.decide(given).index == index


def test_a_method_may_be_ones_own(backend):
    last = ChoicesMethod("last", lambda given: Decision(len(given) - 1, (0.0,) * len(given)))
    assert pick(backend, last)["choice"] == CHOICES[-1]


def test_a_choice_that_merges_with_the_prompts_end_is_scored_from_there(engine, backend):
    prompt, choices = "The capital of Fr", ["ance", "ench"]
    before = engine.tokenizer.encode(prompt).tolist()
    whole = [engine.tokenizer.encode(prompt + choice).tolist() for choice in choices]
    assert any(tokens[: len(before)] != before for tokens in whole)  # else this shows nothing

    @function
    def program(s):
        s += prompt + select("x", choices)

    rows = program.run(backend=backend).get_meta_info("x")["input_token_logprobs"]
    for row, tokens in zip(rows, whole, strict=True):
        start = len(tokens) - len(row)
        assert [token for _, token, _ in row] == tokens[start:]
        assert tokens[:start] == before[:start]
        assert [p for p, *_ in row] == pytest.approx(direct_logprobs(engine, tokens)[start:], abs=1e-4)


def test_a_select_without_a_prompt_says_so(backend):
    @function
    def program(s):
        s += select("x", ["a", "b"])

    with pytest.raises(ProgramError, match="text is empty"):
        program.run(backend=backend)
