"""Chat and completion endpoints as backends of the language: requests, refusals and `select`."""

import json

import pytest
from aiohttp import web

from graftlm import OpenAI, assistant, flush_cache, function, gen, select, user
from graftlm.errors import (
    EngineError,
    InvalidPromptError,
    ProgramCancelledError,
    ProgramError,
    RequestFailedError,
    RequestTimeoutError,
    SamplingParamsError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.lang.backends.openai.fields import tokens_of_each
from graftlm.lang.backends.usage import ApiUsage
from graftlm.testing.app_server import AppServer
from graftlm.testing.scripted_api import ScriptedApi, ScriptedModel, writes_on
from graftlm.testing.server_process import wait_until


def opened(api, **options):
    return OpenAI("scripted", base_url=api.url, **({"is_chat": False} | options))


def completion_program(expr):
    return function(lambda s: s.__iadd__("1 + 1 =" + expr))


def chat_program(expr):
    return function(lambda s: s.__iadd__(user("1 + 1?") + assistant(expr)))


@pytest.fixture
def sums():
    with ScriptedApi(ScriptedModel(lambda prompt: " 2. Sure.")) as api:
        yield api


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {"max_tokens": 128}),
        ({"max_tokens": 3, "temperature": 0, "stop": "."}, {"max_tokens": 3, "temperature": 0, "stop": ["."]}),
        ({"n": 2, "top_p": 0.5}, {"max_tokens": 128, "n": 2, "top_p": 0.5}),
        ({"frequency_penalty": 0.5, "presence_penalty": 1.0, "top_k": -1, "min_p": 0.0, "ignore_eos": False},
         {"max_tokens": 128, "frequency_penalty": 0.5, "presence_penalty": 1.0}),
        ({"return_logprob": True, "top_logprobs_num": 2}, {"max_tokens": 128, "logprobs": 2}),
    ],
)  # fmt: skip
def test_a_completion_request_has_the_parameters_of_the_gen(given, sent, sums):
    with opened(sums) as backend:
        completion_program(gen("x", **given)).run(backend=backend)
    assert sums.bodies == [{"model": "scripted", "prompt": "1 + 1 =", **sent}]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"return_logprob": True, "top_logprobs_num": 2}, {"max_tokens": 128, "logprobs": True, "top_logprobs": 2}),
        ({"json_schema": {"type": "object"}}, {"max_tokens": 128, "response_format": {"type": "json_schema",
          "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}}),
    ],
)  # fmt: skip
def test_a_chat_request_has_the_parameters_of_the_gen(given, sent, sums):
    with opened(sums, is_chat=True) as backend:
        chat_program(gen("x", **given)).run(backend=backend)
    assert sums.bodies == [{"model": "scripted", "messages": [{"role": "user", "content": "1 + 1?"}], **sent}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("is_chat", "program"), [(False, completion_program), (True, chat_program)])
def test_answers_are_parsed(is_chat, program, stream, sums):
    with opened(sums, is_chat=is_chat) as backend:
        state = program(gen("x", stop=".")).run(backend=backend, stream=stream)
        assert (state["x"], "".join(state.text_iter("x"))) == (" 2", " 2")
        meta = state.get_meta_info("x")
        assert backend.usage == ApiUsage(1, sums.prompt_tokens, 2)
    assert (meta["finish_reason"]["type"], meta["completion_tokens"]) == ("stop", 2)
    assert meta["prompt_tokens"] == sums.prompt_tokens


@pytest.mark.parametrize(
    ("says", "given", "numbers"),
    [
        ([" one two three", " four"], {}, [3, 1]),
        ([" one two three", " four five six"], {"max_tokens": 2}, [2, 2]),
        ([" one two three four", " five"], {"max_tokens": 2}, [2, 1]),
        ([" one. two", " three"], {"return_logprob": True}, [3, 1]),
    ],
)
@pytest.mark.parametrize(("is_chat", "program"), [(False, completion_program), (True, chat_program)])
def test_each_of_several_answers_has_its_own_token_count(is_chat, program, says, given, numbers):
    answers = iter(says)
    with (
        ScriptedApi(ScriptedModel(lambda prompt: next(answers))) as api,
        opened(api, is_chat=is_chat) as backend,
    ):
        metas = program(gen("x", n=2, **given)).run(backend=backend).get_meta_info("x")
    assert [meta["completion_tokens"] for meta in metas] == numbers
    lengths = [meta["finish_reason"].get("length") for meta in metas]
    assert all(length in (None, number) for length, number in zip(lengths, numbers, strict=True))


@pytest.mark.parametrize(
    ("total", "letters", "known", "each"),
    [
        (10, [3, 1], [None, None], [8, 2]),
        (10, [3, 1], [None, 4], [6, 4]),
        (10, [3, 1], [4, 4], [8, 2]),  # the endpoint's count is not the sum of these
        (3, [3, 1], [4, None], [2, 1]),
        (0, [3, 1], [None, None], [0, 0]),  # the endpoint sent no count
        (2, [0, 0], [None, None], [0, 0]),
    ],
)
def test_the_tokens_of_one_call_are_divided_among_its_answers(total, letters, known, each):
    assert tokens_of_each(total, letters, known) == each


def test_an_answer_of_zero_tokens_can_be_requested(sums):
    with opened(sums) as backend:
        completion_program(gen("x", max_tokens=0)).run(backend=backend)
    assert sums.bodies[0]["max_tokens"] == 0


def test_usages_can_be_subtracted():
    assert ApiUsage(5, 40, 3, 2, 1) - ApiUsage(2, 10) == ApiUsage(3, 30, 3, 2, 1)


@pytest.mark.parametrize(("is_chat", "program"), [(False, completion_program), (True, chat_program)])
def test_several_answers_and_log_probabilities_are_parsed(is_chat, program, sums):
    with opened(sums, is_chat=is_chat) as backend:
        state = program(gen("x", n=2, stop=".", return_logprob=True, top_logprobs_num=1)).run(backend=backend)
    assert state["x"] == [" 2", " 2"]
    for meta in state.get_meta_info("x"):
        assert meta["output_token_logprobs"] == [[-0.1, None, " 2"], [-0.1, None, "."]]
        assert meta["output_top_logprobs"] == [[[-0.1, None, " 2"]], [[-0.1, None, "."]]]


@pytest.mark.parametrize(
    ("model", "is_chat"),
    [("gpt-4o-mini", True), ("gpt-3.5-turbo-instruct", False), ("davinci-002", False), ("llama-3-base", False)],
)
def test_the_models_name_selects_chat_or_completion(model, is_chat):
    assert OpenAI(model).is_chat is is_chat


@pytest.mark.parametrize(
    ("expr", "is_chat", "says", "kind"),
    [
        (gen("x", regex="a"), False, "regex: this endpoint has no such field", UnsupportedFeatureError),
        (gen("x", dtype=int), True, "dtype: this endpoint has no such field", UnsupportedFeatureError),
        (gen("x", json_schema={}), False, "json_schema: this endpoint", UnsupportedFeatureError),
        (gen("x", top_k=3, min_tokens=2), True, "min_tokens, top_k: this endpoint", UnsupportedFeatureError),
        (gen("x", return_logprob=True, logprob_start_len=0), True, "logprob_start_len", UnsupportedFeatureError),
        (gen("x", dtype=int, regex="a"), True, "dtype 'int' cannot be combined", SamplingParamsError),
        (select("x", ["a"], choices_method="unconditional_likelihood_normalized"), False, "use another",
         UnsupportedFeatureError),
        (gen("x", json_schema="{"), True, "is not JSON", SamplingParamsError),
        ("So: " + gen("x", stop="."), True, "cannot continue a partial message", UnsupportedFeatureError),
    ],
)  # fmt: skip
def test_unsupported_features_are_refused_before_a_request(expr, is_chat, says, kind, sums):
    program = chat_program(expr) if is_chat else completion_program(expr)
    with opened(sums, is_chat=is_chat) as backend, pytest.raises(ProgramError, match=says) as caught:
        program.run(backend=backend).text()
    assert type(caught.value.__cause__) is kind
    assert sums.bodies == []


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda s: s.__iadd__("1 + 1 =" + gen("x")), "a chat endpoint answers messages"),
        (lambda s: s.__iadd__(user("1 + 1 =" + gen("x"))), "a chat endpoint answers messages"),
        (lambda s: s.__iadd__(user("1 + 1?") + gen("x")), "a chat endpoint answers messages"),
        (lambda s: s.__iadd__("Hi! " + user("1 + 1?") + assistant(gen("x"))), "no text outside of"),
    ],
)
def test_a_chat_endpoint_takes_only_messages(write, says, sums):
    with opened(sums, is_chat=True) as backend, pytest.raises(ProgramError, match=says) as caught:
        function(write).run(backend=backend).text()
    assert isinstance(caught.value.__cause__, InvalidPromptError)


def test_a_message_with_a_given_start_is_requested_completely():
    with ScriptedApi(ScriptedModel(lambda prompt: "So: 2.")) as api, opened(api, is_chat=True) as backend:
        for stream in (False, True):
            state = chat_program("So:" + gen("x")).run(backend=backend, stream=stream)
            assert state["x"] == " 2."
        assert state.messages()[-1] == {"role": "assistant", "content": "So: 2."}


# -- select


def prefers(*order):
    """Return the log-probability function of a model that prefers words by their place in a list."""
    return lambda text, token: -0.5 * (order.index(token.strip()) + 1) if token.strip() in order else -9.0


MODEL = ScriptedModel(lambda prompt: " 2.", logprob=prefers("red", "green", "blue"), alternatives=(" green", " red"))


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy_token_selection"])
def test_a_completion_endpoint_that_echoes_scores_every_choice(method):
    with ScriptedApi(MODEL) as api, opened(api) as backend:
        state = completion_program(select("x", [" blue", " red", " green"], choices_method=method)).run(backend=backend)
        assert state["x"] == " red"
        assert state.get_meta_info("x")["normalized_prompt_logprobs"] == [-1.5, -0.5, -1.0]
        assert len(api.bodies) == 1


@pytest.mark.parametrize(("is_chat", "program"), [(False, completion_program), (True, chat_program)])
def test_other_endpoints_score_choices_along_an_answer(is_chat, program):
    with ScriptedApi(MODEL, refused=["echo"]) as api, opened(api, is_chat=is_chat) as backend:
        for _ in range(2):
            state = program(select("x", [" blue", " red", " green"])).run(backend=backend)
            assert state["x"] == " red"
            assert state.get_meta_info("x")["normalized_prompt_logprobs"] == [float("-inf"), -0.5, -1.0]
        assert len(api.bodies) == (2 if is_chat else 3)  # the endpoint's missing echo is detected only once


@pytest.mark.parametrize(
    ("choices", "chosen"),
    [
        ([" two words", " two"], " two words"),  # the answer's own tokens, as far as they match
        ([" two", " red"], " two"),
        ([" twofold", " red"], " red"),
        ([" two word", " green"], " two word"),
    ],
)
def test_a_choice_is_compared_with_the_answer_token_by_token(choices, chosen):
    model = ScriptedModel(
        lambda prompt: " two words", logprob=prefers("words", "two", "red"), alternatives=(" red", " green")
    )
    with ScriptedApi(model, refused=["echo"]) as api, opened(api) as backend:
        assert completion_program(select("x", choices)).run(backend=backend)["x"] == chosen


@pytest.mark.parametrize(
    ("choices", "options", "says", "kind"),
    [
        ([" pink"], {}, "matches none of", RequestFailedError),
        ([" redder", " red"], {}, "have the same beginning", UnsupportedFeatureError),
        ([" red"], {"tells_logprobs": False}, "reports no log-probabilities", UnsupportedFeatureError),
    ],
)
def test_choices_that_the_answer_cannot_distinguish_are_an_error(choices, options, says, kind):
    model = ScriptedModel(lambda prompt: " red", logprob=prefers("red"))
    with (
        ScriptedApi(model, refused=["echo"], **options) as api,
        opened(api) as backend,
        pytest.raises(ProgramError, match=says) as caught,
    ):
        completion_program(select("x", choices)).run(backend=backend).text()
    assert isinstance(caught.value.__cause__, kind)


def test_a_refused_prompt_does_not_change_the_scoring_of_later_ones():
    with ScriptedApi(MODEL) as api, opened(api) as backend:
        program = completion_program(select("x", [" blue", " red"]))
        api.refused = frozenset({"prompt"})
        with pytest.raises(ProgramError, match="does not support prompt"):
            program.run(backend=backend).text()
        api.refused = frozenset()
        assert program.run(backend=backend).get_meta_info("x")["normalized_prompt_logprobs"] == [-1.5, -0.5]


# -- Errors


@pytest.mark.parametrize("stream", [False, True])
def test_an_unreachable_endpoint_is_reported(stream):
    with OpenAI("any", base_url="http://127.0.0.1:9/v1", is_chat=False) as backend:
        state = completion_program(gen("x")).run(backend=backend, stream=True)
        with pytest.raises(ProgramError, match=r"127\.0\.0\.1:9") as caught:
            "".join(state.text_iter()) if stream else state["x"]
    assert isinstance(caught.value.__cause__, UnavailableError)


@pytest.mark.parametrize("dies_after", [0, 1, 2])
@pytest.mark.parametrize(("is_chat", "program"), [(False, completion_program), (True, chat_program)])
def test_an_endpoint_that_dies_during_an_answer_is_an_error(dies_after, is_chat, program):
    model = ScriptedModel(lambda prompt: " one two three four")
    with ScriptedApi(model, dies_after=dies_after) as api, opened(api, is_chat=is_chat) as backend:
        state = program(gen("x")).run(backend=backend, stream=True)
        with pytest.raises(ProgramError, match=r"the connection to .* failed") as caught:
            "".join(state.text_iter())
    assert isinstance(caught.value.__cause__, UnavailableError)


@pytest.mark.parametrize("stream", [False, True])
def test_a_silent_endpoint_times_out(stream):
    with ScriptedApi(ScriptedModel(str), hangs=True) as api, opened(api, timeout_s=0.1) as backend:
        state = completion_program(gen("x")).run(backend=backend, stream=True)
        with pytest.raises(ProgramError, match=r"sent nothing for 0\.1 s") as caught:
            "".join(state.text_iter()) if stream else state["x"]
        wait_until(lambda: api.under_way == 0, 10.0, "the end of the request")
    assert isinstance(caught.value.__cause__, RequestTimeoutError)


@pytest.mark.parametrize("ends", ["cancel", "drop"])
@pytest.mark.parametrize("num_api_spec_tokens", [None, 64])
def test_an_unreferenced_run_leaves_no_request(ends, num_api_spec_tokens):
    def write(s):
        s += "1 + 1 =" + gen("x", stop=".")

    with ScriptedApi(ScriptedModel(str), hangs=True) as api, opened(api) as backend:
        state = function(write, num_api_spec_tokens=num_api_spec_tokens).run(backend=backend, stream=True)
        wait_until(lambda: api.under_way == 1, 10.0, "a request")
        if ends == "cancel":
            state.cancel()
            with pytest.raises(ProgramCancelledError):
                state.text()
        del state
        wait_until(lambda: api.under_way == 0, 10.0, "the end of the request")


def test_a_url_that_is_not_an_openai_endpoint_is_reported(server):
    with (
        OpenAI("demo", base_url=f"{server.url}/health", is_chat=False) as backend,
        pytest.raises(ProgramError, match=r"404.*/health/completions; for most endpoints, base_url ends in /v1"),
    ):
        completion_program(gen("x")).run(backend=backend).text()


@pytest.mark.parametrize("answer", ["not json", "[]", json.dumps({"error": None})])
def test_a_malformed_answer_is_an_error(answer):
    async def other(request):
        return web.Response(text=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post("/completions", other)
    with AppServer(app) as server, opened(server) as backend, pytest.raises(ProgramError) as caught:
        completion_program(gen("x")).run(backend=backend).text()
    assert type(caught.value.__cause__) is EngineError


def test_flush_cache_of_an_endpoint_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="flush_cache"):
        flush_cache(OpenAI("any"))


def test_a_fork_sends_an_endpoint_only_the_requests_of_its_gens():
    prefix = "A long prefix. " * 20

    @function
    def program(s):
        s += prefix
        forks = s.fork(2)
        forks += gen("x")
        forks.join()

    with ScriptedApi(ScriptedModel(writes_on(prefix + "Yes."))) as api, opened(api) as backend:
        assert program.run(backend=backend)["x"] == ["Yes."] * 2
        assert len(api.bodies) == 2


@pytest.mark.parametrize(
    ("is_chat", "program", "choices", "match", "cause"),
    [
        (False, completion_program, [{"text": "2"}], "answered one completion", UnsupportedFeatureError),
        (True, chat_program, [{"message": {"content": "2"}}], "answered one completion", UnsupportedFeatureError),
        (False, completion_program, [], "0 choices, expected n=2", EngineError),
        (False, completion_program, [{"text": "2"}, {"text": None}], "without text", EngineError),
        (False, completion_program, [{"text": "2"}, None], "must answer with choices", EngineError),
        (True, chat_program, [{"message": {"content": None}}, {"text": "2"}], "without a message", EngineError),
    ],
)
def test_missing_completions_are_an_error(is_chat, program, choices, match, cause):
    async def answer(request):
        return web.json_response({"choices": choices})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    with (
        AppServer(app) as server,
        OpenAI("scripted", base_url=server.url, is_chat=is_chat) as backend,
        pytest.raises(ProgramError, match=match) as caught,
    ):
        program(gen("x", n=2)).run(backend=backend).text()
    assert isinstance(caught.value.__cause__, cause)
