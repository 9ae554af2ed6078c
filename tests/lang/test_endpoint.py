"""A server behind the language: its connections and its refusals."""

import json
import os
import subprocess
import sys

import pytest
from aiohttp import web

from graftlm import RuntimeEndpoint, assistant, function, gen, select, user
from graftlm.errors import (
    EngineError,
    ProgramError,
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


def test_a_process_that_closes_nothing_ends_quietly(server):
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
def test_a_forked_process_goes_on_and_leaves_its_parents_connections_alone():
    with AppServer(sglang()) as server:
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING_SCRIPT, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    assert done.stdout.split() == ["2"] * 4


def test_a_closed_endpoint_opens_anew(server):
    program = function(lambda s: s.__iadd__("1 + 1 =" + gen("x", max_tokens=3)))
    with RuntimeEndpoint(server.url) as endpoint:
        first = program.run(temperature=0, backend=endpoint)
        endpoint.close()
        assert program.run(temperature=0, backend=endpoint).text() == first.text()


# -- A server that has the wire of /generate, and nothing that only graftlm has.

LOGPROBS = {22: -0.5, 23: -1.5}


def sglang(*, model_path="/models/Qwen3-8B", info_path="/get_model_info", events=None):
    """Return an application that answers every prompt with 2, as SGLang's server writes it."""

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
def test_a_server_that_tells_no_chat_template_is_known_by_its_model(info_path):
    program = function(lambda s: s.__iadd__(user("1 + 1?") + assistant(gen("x"))))
    with AppServer(sglang(info_path=info_path)) as server, RuntimeEndpoint(server.url) as endpoint:
        state = program.run(backend=endpoint)
    assert state.text().startswith("<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2")
    assert state.get_meta_info("x")["completion_tokens"] == 1


@pytest.mark.parametrize("options", [{"model_path": None}, {"info_path": "/elsewhere"}])
def test_a_server_that_tells_nothing_of_its_model_needs_a_template(options):
    program = function(lambda s: s.__iadd__(user("1 + 1?") + assistant(gen("x"))))
    with AppServer(sglang(**options)) as server:
        with RuntimeEndpoint(server.url) as endpoint, pytest.raises(ProgramError, match="name one of") as caught:
            program.run(backend=endpoint)
        assert isinstance(caught.value.__cause__, UnsupportedFeatureError)
        with RuntimeEndpoint(server.url, chat_template="gemma") as endpoint:
            assert program.run(backend=endpoint).text().startswith("<start_of_turn>user\n")


def test_select_needs_no_more_than_generate():
    with AppServer(sglang()) as server, RuntimeEndpoint(server.url) as endpoint:
        state = function(lambda s: s.__iadd__("1 + 1 =" + select("x", ["3", "2"]))).run(backend=endpoint)
    assert state["x"] == "2"
    assert state.get_meta_info("x")["normalized_prompt_logprobs"] == [-1.5, -0.5]


def test_a_server_that_refuses_to_tell_is_not_taken_for_one_that_cannot():
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
        program.run(backend=endpoint)


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
        ([event("a"), "{"], "no JSON", EngineError),
        (["{}"], "answered no completion", EngineError),
    ],
)
def test_a_stream_that_does_not_end_well_is_an_error(events, says, kind):
    with AppServer(sglang(events=events)) as server, RuntimeEndpoint(server.url) as endpoint:
        state = function(lambda s: s.__iadd__("1 + 1 =" + gen("x"))).run(backend=endpoint, stream=True)
        with pytest.raises(ProgramError, match=says) as caught:
            "".join(state.text_iter())
    assert type(caught.value.__cause__) is kind


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_dies_while_it_answers_is_an_error(stream):
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
        with pytest.raises(ProgramError, match="cannot talk to") as caught:
            "".join(program.run(backend=endpoint, stream=stream).text_iter())
    assert type(caught.value.__cause__) is UnavailableError


GOOD = {"text": "2", "meta_info": {"finish_reason": None}}


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (GOOD, "1 completions of /generate, expected 3"),
        ([GOOD] * 4, "4 completions of /generate, expected 3"),
        ([GOOD, GOOD, GOOD | {"text": None}], "no completion"),
        ([GOOD, GOOD, GOOD | {"meta_info": None}], "no completion"),
        ([GOOD, GOOD, GOOD | {"meta_info": {"finish_reason": "stop"}}], "no completion"),
    ],
)
def test_completions_that_are_missing_are_an_error(answer, match):
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
        program.run(backend=endpoint)
    assert isinstance(caught.value.__cause__, EngineError)


def test_a_url_that_is_too_long_is_named(server):
    with (
        RuntimeEndpoint(f"{server.url}/v1") as backend,
        pytest.raises(ProgramError, match=r"404.*/v1/generate; leave /v1 out of base_url"),
    ):
        function(lambda s: s.__iadd__("a" + gen("x"))).run(backend=backend)
