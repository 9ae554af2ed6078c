"""A server as a backend of the language: connections and refusals."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
from aiohttp import web

from graftlm import OpenAI, RuntimeEndpoint, assistant, function, gen, select, user
from graftlm.errors import (
    ConfigError,
    EngineError,
    GrammarError,
    ProgramError,
    PromptTooLongError,
    RequestFailedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.testing.app_server import AppServer

SCRIPT = """
import sys
from graftlm import RuntimeEndpoint, function, gen, set_default_backend

set_default_backend(RuntimeEndpoint(sys.argv[1]))
print(function(lambda s: s.__iadd__("1 + 1 =" + gen("x", max_tokens=3))).run(temperature=0)["x"])
"""


def test_a_process_that_closes_no_backend_ends_without_a_message(server):
    done = subprocess.run([sys.executable, "-c", SCRIPT, server.url], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip()


FORKING_SCRIPT = """
import os, sys
from graftlm import RuntimeEndpoint, function, gen

program = function(lambda s: s.__iadd__("1 + 1 =" + gen("x")))
endpoint = RuntimeEndpoint(sys.argv[1])

def tell():
    os.write(1, program.run(backend=endpoint)["x"].encode() + b"\\n")  # two processes write here: a line at once

tell()
child = os.fork()
tell()
if child:
    os.waitpid(child, 0)
    tell()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system starts every process anew")
def test_a_forked_process_works_and_does_not_use_its_parents_connections():
    with AppServer(sglang()) as server:
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING_SCRIPT, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    assert done.stdout.split() == ["2"] * 4


def test_a_closed_endpoint_can_be_used_again(server):
    program = function(lambda s: s.__iadd__("1 + 1 =" + gen("x", max_tokens=3)))
    with RuntimeEndpoint(server.url) as endpoint:
        first = program.run(temperature=0, backend=endpoint)
        endpoint.close()
        assert program.run(temperature=0, backend=endpoint).text() == first.text()


# -- A server with the format of /generate, but without any of graftlm's extensions

LOGPROBS = {22: -0.5, 23: -1.5}


def sglang(*, model_path="/models/Qwen3-8B", info_path="/get_model_info", events=None):
    """Return an application that answers every prompt with 2, in the format of SGLang's server."""

    def answer(token_ids, start):
        meta = {"id": "a", "finish_reason": {"type": "stop", "matched": 7}, "prompt_tokens": 3, "completion_tokens": 1}
        meta["cached_tokens"] = 0
        if start is not None:
            rows = [[LOGPROBS.get(token_id, -1.0), token_id, None] for token_id in token_ids]
            meta["input_token_logprobs"] = [[None, token_ids[start], None], *rows[start + 1 :]]
        return {"text": "2", "meta_info": meta}

    def tokens(text):
        return [10, 11, 12, *([20 + int(text[-1])] if text[-1] in "23" else [])]

    async def generate(request):
        body = await request.json()
        if body.get("stream"):
            return web.Response(text="".join(f"data: {e}\n\n" for e in events or ()), content_type="text/event-stream")
        if isinstance(body.get("text"), str):
            return web.json_response(answer(tokens(body["text"]), None))
        prompts = body["input_ids"] if "input_ids" in body else [tokens(text) for text in body["text"]]
        starts = body["logprob_start_len"]
        starts = starts if isinstance(starts, list) else [starts] * len(prompts)
        return web.json_response([answer(*pair) for pair in zip(prompts, starts, strict=True)])

    async def info(request):
        return web.json_response({"model_path": model_path, "is_generation": True} if model_path else {})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get(info_path, info)
    return app


@pytest.mark.parametrize("info_path", ["/get_model_info", "/model_info"])
def test_without_a_reported_template_the_models_name_selects_it(info_path):
    program = function(lambda s: s.__iadd__(user("1 + 1?") + assistant(gen("x"))))
    with AppServer(sglang(info_path=info_path)) as server, RuntimeEndpoint(server.url) as endpoint:
        state = program.run(backend=endpoint)
    assert state.text().startswith("<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2")
    assert state.get_meta_info("x")["completion_tokens"] == 1


@pytest.mark.parametrize("options", [{"model_path": None}, {"info_path": "/elsewhere"}])
def test_a_server_without_a_model_name_needs_a_template(options):
    program = function(lambda s: s.__iadd__(user("1 + 1?") + assistant(gen("x"))))
    with AppServer(sglang(**options)) as server:
        with RuntimeEndpoint(server.url) as endpoint, pytest.raises(ProgramError, match="to the backend") as caught:
            program.run(backend=endpoint).text()
        assert isinstance(caught.value.__cause__, UnsupportedFeatureError)
        with RuntimeEndpoint(server.url, chat_template="gemma") as endpoint:
            assert program.run(backend=endpoint).text().startswith("<start_of_turn>user\n")


def test_select_needs_only_the_generate_endpoint():
    with AppServer(sglang()) as server, RuntimeEndpoint(server.url) as endpoint:
        state = function(lambda s: s.__iadd__("1 + 1 =" + select("x", ["3", "2"]))).run(backend=endpoint)
    assert state["x"] == "2"
    assert state.get_meta_info("x")["normalized_prompt_logprobs"] == [-1.5, -0.5]


def test_a_refused_model_info_request_is_an_error():
    async def refuse(request):
        return web.json_response({"error": {"message": "who are you?"}}, status=401)

    app = web.Application()
    app.router.add_get("/get_model_info", refuse)
    program = function(lambda s: s.__iadd__(user("1 + 1?")))
    with (
        AppServer(app) as server,
        RuntimeEndpoint(server.url) as endpoint,
        pytest.raises(ProgramError, match="who are"),
    ):
        program.run(backend=endpoint).text()


def event(text, reason=None):
    return json.dumps({"text": text, "meta_info": {"finish_reason": reason}})


@pytest.mark.parametrize(
    ("events", "says", "kind"),
    [
        ([], "without an event", UnavailableError),
        ([event("a"), event("ab")], "before its text was complete", UnavailableError),
        ([event("a"), event("b", {"type": "stop"})], "streams pieces of text", UnsupportedFeatureError),
        ([event("a"), '{"error": {"message": "out of memory"}}'], "out of memory", RequestFailedError),
        ([event("a", {"type": "abort", "message": "shutting down"})], "shutting down", RequestFailedError),
        ([event("a"), "{"], "not JSON", EngineError),
        (["{}"], "must answer /generate with text and meta_info", EngineError),
    ],
)
def test_a_stream_that_breaks_is_an_error(events, says, kind):
    with AppServer(sglang(events=events)) as server, RuntimeEndpoint(server.url) as endpoint:
        state = function(lambda s: s.__iadd__("1 + 1 =" + gen("x"))).run(backend=endpoint, stream=True)
        with pytest.raises(ProgramError, match=says) as caught:
            "".join(state.text_iter())
    assert type(caught.value.__cause__) is kind


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_dies_during_an_answer_is_an_error(stream):
    async def generate(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(f"data: {event('a')}\n\n".encode())
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    with AppServer(app) as server, RuntimeEndpoint(server.url) as endpoint:
        program = function(lambda s: s.__iadd__("1 + 1 =" + gen("x")))
        with pytest.raises(ProgramError, match=r"the connection to .* failed") as caught:
            "".join(program.run(backend=endpoint, stream=stream).text_iter())
    assert type(caught.value.__cause__) is UnavailableError


GOOD = {"text": "2", "meta_info": {"finish_reason": None}}


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (GOOD, "1 completions to /generate, expected 3"),
        ([GOOD] * 4, "4 completions to /generate, expected 3"),
        ([GOOD, GOOD, GOOD | {"text": None}], "with text and meta_info"),
        ([GOOD, GOOD, GOOD | {"meta_info": None}], "with text and meta_info"),
        ([GOOD, GOOD, GOOD | {"meta_info": {"finish_reason": "stop"}}], "with text and meta_info"),
    ],
)
def test_missing_completions_are_an_error(answer, match):
    async def generate(request):
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/generate", generate)
    program = function(lambda s: s.__iadd__("1 + 1 =" + gen("x", n=3)))
    with (
        AppServer(app) as server,
        RuntimeEndpoint(server.url) as endpoint,
        pytest.raises(ProgramError, match=match) as caught,
    ):
        program.run(backend=endpoint).text()
    assert isinstance(caught.value.__cause__, EngineError)


def test_the_error_for_a_url_with_v1_names_the_url(server):
    with (
        RuntimeEndpoint(f"{server.url}/v1") as backend,
        pytest.raises(ProgramError, match=r"404.*/v1/generate; leave /v1 out of base_url"),
    ):
        function(lambda s: s.__iadd__("a" + gen("x"))).run(backend=backend).text()


def garbled(**routes):
    """Return an application that answers some routes with a given text."""
    app = web.Application()
    for route, text in routes.items():
        path = {"tokenize": "/v1/tokenize", "generate": "/generate", "info": "/get_model_info"}[route]
        handler = answering(text)
        app.router.add_route("*", path, handler)
    return app


def answering(text):
    async def answer(request):
        return web.Response(text=text, content_type="application/json")

    return answer


TOKENS = '{"tokens": [[1], [1, 2], [1, 3]]}'
DEEP = "[" * 100_000


def scores(*logprobs):
    """Return the answer of /generate for two choices, with one scored token each."""
    answers = [
        f'{{"text": "", "meta_info": {{"finish_reason": null, "input_token_logprobs": [[null, 1], [{logprob}, 2]]}}}}'
        for logprob in logprobs
    ]
    return f"[{', '.join(answers)}]"


def test_the_choice_with_the_higher_score_is_selected():
    with AppServer(garbled(tokenize=TOKENS, generate=scores(-2, "0.000001"))) as server:
        state = function(lambda s: s.__iadd__("a" + select("x", ["b", "c"]))).run(backend=RuntimeEndpoint(server.url))
    assert state["x"] == "c"


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        *[
            ({"tokenize": TOKENS, "generate": scores(-1.0, bad)}, "/generate answered input_token_logprobs")
            for bad in ("null", "NaN", "-Infinity", "true", '"-5"', "0.5", "[]")
        ],
        ({"tokenize": TOKENS, "generate": scores(-1.0, "-1.0, 2], [-1.0")}, "/generate answered input_token_logprobs"),
        *[
            ({"tokenize": bad}, "/v1/tokenize must answer with tokens")
            for bad in ("[]", "{}", '{"tokens": 3}', '{"tokens": [[1], [1, "a"], [1]]}', '{"tokens": [[1]]}')
        ],
        ({"tokenize": DEEP}, "/v1/tokenize must answer with JSON"),
    ],
)
def test_malformed_scores_are_an_error(routes, says):
    with (
        AppServer(garbled(**routes)) as server,
        RuntimeEndpoint(server.url) as endpoint,
        pytest.raises(ProgramError, match=f"{server.url}{says}") as caught,
    ):
        function(lambda s: s.__iadd__("a" + select("x", ["b", "c"]))).run(backend=endpoint).text()
    assert type(caught.value.__cause__) is EngineError


@pytest.mark.parametrize("template", ["3", '"{% if %}"', '"x", "special_tokens": [1]', '"x", "prompt_prefix": 3'])
def test_a_malformed_chat_template_is_an_error(template):
    info = f'{{"chat_template": {template}}}'
    with (
        AppServer(garbled(info=info)) as server,
        RuntimeEndpoint(server.url) as endpoint,
        pytest.raises(ProgramError, match="/get_model_info answered a") as caught,
    ):
        function(lambda s: s.__iadd__(user("a"))).run(backend=endpoint).text()
    assert type(caught.value.__cause__) is EngineError


@pytest.mark.parametrize(
    "make",
    [
        *[partial(RuntimeEndpoint, "http://h", timeout_s=bad) for bad in ("x", -1, 0, True, float("nan"))],
        partial(OpenAI, "m", timeout_s=-1),
        partial(RuntimeEndpoint, "http://h", chat_template="chatmll"),
        partial(OpenAI, "m", chat_template="chatmll"),
        partial(OpenAI, None),
    ],
)
def test_a_wrong_option_is_refused_at_once(make):
    with pytest.raises(ConfigError, match=r"timeout_s must|no chat template 'chatmll'|model must"):
        make()


@pytest.mark.parametrize(
    ("prompt", "options", "kind"),
    [("a", {"json_schema": '{"type": 5}'}, GrammarError), ("a b " * 20_000, {}, PromptTooLongError)],
)
def test_an_error_has_the_same_cause_on_every_backend(backend, prompt, options, kind):
    with pytest.raises(ProgramError) as caught:
        function(lambda s: s.__iadd__(prompt + gen("x", max_tokens=1, **options))).run(backend=backend).text()
    assert type(caught.value.__cause__) is kind
