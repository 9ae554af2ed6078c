"""`select` compared with directly computed log-probabilities, and the tokens that it computes."""

import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean

import pytest

from graftlm import (
    RuntimeEndpoint,
    flush_cache,
    function,
    greedy_token_selection,
    select,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from graftlm.errors import ProgramError
from graftlm.lang import ChoiceScore, ChoicesMethod, Decision
from graftlm.testing.server_process import wait_until

PROMPT = "Question: What is the capital of France?\nAnswer: The capital of France is"
CHOICES = [" Paris", " Athens", " Lima, I think", " P"]
LONG_PROMPT = "The capital of France is Paris. The day after Monday is Tuesday. " * 58 + PROMPT
EIGHT = [" Paris", " Athens", " Lima, I think", " P", " Rome", " Oslo or Bergen", " Paris, France", " not known"]
METHODS = [token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized]


def direct_logprobs(engine, token_ids):
    output = engine.generate([token_ids], {"max_tokens": 1, "prompt_logprobs": 0})[0]
    return [0.0 if t is None else t.logprob for t in output.prompt_logprobs]


def direct_scores(engine):
    """Return (scores with the prompt, scores without it) for each choice's tokens."""
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
def test_scores_equal_a_direct_computation(method, engine, backend):
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


def shared_tokens(engine, backend):
    """Return the number of tokens of the long prompt that a choice can reuse: whole pages, without the last token."""
    page_size = engine.config.cache.page_size if type(backend).__name__ == "EngineBackend" else 1
    num_shared = len(engine.tokenizer.encode(LONG_PROMPT)) - 1
    assert num_shared >= 1000
    return num_shared // page_size * page_size


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_prompt_is_computed_once_for_all_choices(method, engine, backend):
    @function
    def program(s):
        s += LONG_PROMPT + select("choice", EIGHT, choices_method=method)
        return s.get_meta_info("choice")["cached_tokens"]

    flush_cache(backend)
    shared = shared_tokens(engine, backend)
    first, *others = program.run(backend=backend).ret_value
    assert first == 0
    assert len(others) == 7
    assert min(others) >= shared
    assert min(program.run(backend=backend).ret_value) >= shared


def test_a_select_is_one_step_with_only_the_choices_own_tokens(engine, in_process):
    @function
    def program(s):
        s += LONG_PROMPT + select("choice", EIGHT, choices_method=unconditional_likelihood_normalized)

    program.run(backend=in_process)
    wait_until(lambda: engine.stats().running_requests == 0)
    before = engine.stats()
    meta = program.run(backend=in_process).get_meta_info("choice")
    after = engine.stats()
    num_own = sum(len(row) for row in meta["input_token_logprobs"])
    num_again = len(engine.tokenizer.encode(LONG_PROMPT)) - shared_tokens(engine, in_process)
    computed = after.prompt_tokens - before.prompt_tokens - (after.cached_tokens - before.cached_tokens)
    assert computed == len(EIGHT) * num_again + 2 * num_own  # after the prompt, and by themselves
    assert after.steps - before.steps == 1


class WithoutTokenizer(BaseHTTPRequestHandler):
    """Forwards all requests except /v1/tokenize, like a server without this route."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, answer = 404, b'{"error": {"message": "Not Found"}}'
        if self.path != "/v1/tokenize":
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self.server.target + self.path, body, headers)
            with urllib.request.urlopen(request, timeout=30) as reply:
                status, answer = reply.status, reply.read()
        self.server.paths.append(self.path)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture
def without_tokenizer(server):
    with ThreadingHTTPServer(("127.0.0.1", 0), WithoutTokenizer) as proxy:
        proxy.target, proxy.paths = server.url, []
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


def test_without_a_tokenizer_route_tokens_are_read_from_logprobs(endpoint, without_tokenizer):
    expected = pick(endpoint, token_length_normalized).get_meta_info("choice")
    with RuntimeEndpoint(f"http://127.0.0.1:{without_tokenizer.server_port}") as backend:
        found = [pick(backend, token_length_normalized).get_meta_info("choice") for _ in range(2)]
    for meta in found:
        assert meta["normalized_prompt_logprobs"] == pytest.approx(expected["normalized_prompt_logprobs"], abs=1e-4)
    assert without_tokenizer.paths == ["/v1/tokenize", "/generate", "/generate", "/generate", "/generate"]


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
        # The choice that has ended keeps its mean, -1. It loses against -0.5, and wins against -2.
        (greedy_token_selection, scores((-1.0,), (-1.0, -0.5)), 1),
        (greedy_token_selection, scores((-1.0,), (-1.0, -2.0)), 0),
        (greedy_token_selection, scores((-1.0,), (-1.0,)), 0),
        (unconditional_likelihood_normalized, scores((-2.0,), (-1.0,), alone=[(-9.0,), (-1.0,)]), 0),
        (unconditional_likelihood_normalized, scores((-2.0,), (-1.0,), alone=[(-2.0,), (-2.0,)]), 1),
    ],
)
def test_choices_methods_decide(method, given, index):
    assert method.decide(given).index == index


def test_a_custom_choices_method_is_used(backend):
    last = ChoicesMethod("last", lambda given: Decision(len(given) - 1, (0.0,) * len(given)))
    assert pick(backend, last)["choice"] == CHOICES[-1]


def test_a_choice_that_merges_with_the_end_of_the_prompt_is_scored_from_there(engine, backend):
    prompt, choices = "The capital of Fr", ["ance", "ench"]
    before = engine.tokenizer.encode(prompt).tolist()
    whole = [engine.tokenizer.encode(prompt + choice).tolist() for choice in choices]
    assert any(tokens[: len(before)] != before for tokens in whole)  # otherwise this test shows nothing

    @function
    def program(s):
        s += prompt + select("x", choices)

    rows = program.run(backend=backend).get_meta_info("x")["input_token_logprobs"]
    for row, tokens in zip(rows, whole, strict=True):
        start = len(tokens) - len(row)
        assert [token for _, token, _ in row] == tokens[start:]
        assert tokens[:start] == before[:start]
        assert [p for p, *_ in row] == pytest.approx(direct_logprobs(engine, tokens)[start:], abs=1e-4)


def test_a_select_without_a_prompt_is_an_error(backend):
    @function
    def program(s):
        s += select("x", ["a", "b"])

    with pytest.raises(ProgramError, match="text is empty"):
        program.run(backend=backend).text()
