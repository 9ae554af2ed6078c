"""The library `anthropic` as a backend of the language: chats on graftlm's own Messages API, refusals and errors."""

import asyncio
import json
import subprocess
import sys

import pytest
from aiohttp import web

from graftlm import Anthropic, assistant, flush_cache, function, gen, select, system, user
from graftlm.errors import (
    ConfigError,
    EngineError,
    InvalidPromptError,
    ProgramCancelledError,
    ProgramError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.lang.backends.usage import ApiUsage
from graftlm.testing.app_server import AppServer
from graftlm.testing.server_process import wait_until

SCHEMA = {"type": "object", "properties": {"sum": {"enum": [5, 6]}}, "required": ["sum"], "additionalProperties": False}


@function
def talk(s, question):
    s += system("Answer in one sentence.")
    s += user(question)
    s += assistant(gen("answer", max_tokens=24))
    s += user("Which day comes after Thursday?")
    s += assistant("The day" + gen("day", max_tokens=12) + " or" + gen("other", max_tokens=4))


def chat_program(expr):
    def write(s):
        s += user("What is 2 plus 3?") + assistant(expr)

    return function(write)


def opened(url, **options):
    return Anthropic("demo", **({"base_url": url, "api_key": "none", "max_retries": 0} | options))


@pytest.fixture
def backend(server):
    with opened(server.url) as it:
        yield it


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_of_several_turns_has_the_text_of_the_engine(stream, backend, in_process):
    expected = talk.run("What is 2 plus 3?", backend=in_process, temperature=0)
    state = talk.run("What is 2 plus 3?", backend=backend, temperature=0, stream=stream)
    names = ("answer", "day", "other")
    assert [state[name] for name in names] == [expected[name] for name in names]
    assert state.messages() == expected.messages()
    if stream:
        assert "".join(state.text_iter("day")) == expected["day"]


def test_a_batch_has_the_texts_of_the_engine(backend, in_process):
    questions = [f"What is {i} plus 3?" for i in range(12)]
    expected = talk.run_batch(questions, backend=in_process, temperature=0)
    states = talk.run_batch(questions, backend=backend, temperature=0, num_threads=4)
    assert [state.messages() for state in states] == [state.messages() for state in expected]


def test_text_without_messages_is_a_message_of_the_user(backend):
    asked = chat_program(gen("x", max_tokens=24)).run(backend=backend, temperature=0)
    state = function(lambda s: s.__iadd__("What is 2 plus 3?" + gen("x", max_tokens=24))).run(
        backend=backend, temperature=0, stream=True
    )
    assert state["x"] == asked["x"]
    assert state.text() == "What is 2 plus 3?" + asked["x"]


def test_a_stop_string_ends_the_text_and_is_reported(backend):
    state = chat_program(gen("x", stop=["=", "?"], temperature=0, top_k=1, top_p=0.5)).run(backend=backend)
    meta = state.get_meta_info("x")
    assert (state["x"], meta["finish_reason"]) == ("2 + 3 ", {"type": "stop", "matched": "="})


@pytest.mark.parametrize("stream", [False, True])
def test_token_counts_are_those_of_the_server(stream, backend, endpoint):
    expr = gen("x", max_tokens=4, temperature=0)
    expected = chat_program(expr).run(backend=endpoint).get_meta_info("x")
    state = chat_program(expr).run(backend=backend, stream=stream)
    meta = state.get_meta_info("x")
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["cached_tokens"] > 0
    counts = (expected["prompt_tokens"], 4)
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == counts
    assert backend.usage == ApiUsage(1, *counts)
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == counts
    backend.token_usage.reset()
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (0, 0)


def test_a_json_schema_constrains_the_answer(backend):
    state = chat_program(gen("x", json_schema=json.dumps(SCHEMA), temperature=0)).run(backend=backend)
    assert json.loads(state["x"])["sum"] in (5, 6)


def test_a_gen_without_max_tokens_has_at_most_128(recorded):
    chat_program(gen("x")).run(backend=opened(recorded.url)).text()
    assert recorded.bodies[-1]["max_tokens"] == 128


@pytest.mark.parametrize(
    ("expr", "says", "kind"),
    [
        (gen("x", regex="a"), "regex: this endpoint has no such field", UnsupportedFeatureError),
        (gen("x", n=2), "n: this endpoint has no such field", UnsupportedFeatureError),
        (gen("x", frequency_penalty=0.5), "frequency_penalty: this", UnsupportedFeatureError),
        (gen("x", return_logprob=True), "return_logprob: this", UnsupportedFeatureError),
        (select("x", ["a", "b"]), "use gen and compare", UnsupportedFeatureError),
    ],
)
def test_unsupported_features_are_refused_before_a_request(expr, says, kind, recorded):
    with opened(recorded.url) as backend, pytest.raises(ProgramError, match=says) as caught:
        chat_program(expr).run(backend=backend).text()
    assert type(caught.value.__cause__) is kind
    assert recorded.bodies == []


def test_values_without_effect_are_accepted_and_not_sent(recorded):
    neutral = gen("x", n=1, top_k=-1, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0, return_logprob=False)
    with opened(recorded.url) as backend:
        chat_program(neutral).run(backend=backend).text()
    assert recorded.bodies[0].keys() == {"model", "messages", "max_tokens"}


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda s: s.__iadd__(user("1 + 1 =" + gen("x"))), "use gen and select within assistant"),
        (lambda s: s.__iadd__(user("1 + 1?") + gen("x")), "or use no messages at all"),
        (lambda s: s.__iadd__("Hi! " + user("1 + 1?") + assistant(gen("x"))), "no text outside of"),
    ],
)
def test_a_gen_outside_of_an_assistants_message_is_refused(write, says, backend):
    with pytest.raises(ProgramError, match=says) as caught:
        function(write).run(backend=backend).text()
    assert isinstance(caught.value.__cause__, InvalidPromptError)


def test_a_model_that_cannot_continue_a_message_is_asked_for_all_of_it(server):
    with opened(server.url, continue_final_message=False) as backend:
        assert chat_program("2 + 3" + gen("x")).run(backend=backend, temperature=0)["x"] == " = 5."
        with pytest.raises(ProgramError, match="must start with the program's text 'Five'") as caught:
            chat_program("Five" + gen("x")).run(backend=backend, temperature=0).text()
    assert isinstance(caught.value.__cause__, RequestFailedError)


def test_several_gens_of_a_message_can_share_one_call(server):
    def write(s):
        s += user("What is 2 plus 3?")
        s += assistant("2" + gen("x", stop="=") + "=" + gen("y", stop="."))

    with opened(server.url) as backend:
        state = function(write, num_api_spec_tokens=32).run(backend=backend, temperature=0)
        assert (state["x"], state["y"]) == (" + 3 ", " 5")
        assert (backend.usage.calls, backend.usage.saved_calls) == (1, 1)


# -- Errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("expr", "options", "says", "kind"),
    [
        (gen("x", temperature=-1.0), {}, "400: temperature", RequestError),
        (gen("x"), {"base_url": "http://127.0.0.1:9"}, r"cannot talk to http://127\.0\.0\.1:9", UnavailableError),
    ],
)
def test_errors_of_the_library_become_graftlms(expr, options, says, kind, stream, server):
    with opened(server.url, **options) as backend, pytest.raises(ProgramError, match=says) as caught:
        chat_program(expr).run(backend=backend, stream=stream)["x"]
    assert type(caught.value.__cause__) is kind


def test_an_unknown_model_is_the_requests_fault(server):
    with (
        Anthropic("other", base_url=server.url, api_key="none") as backend,
        pytest.raises(ProgramError, match="answered 404") as caught,
    ):
        chat_program(gen("x")).run(backend=backend).text()
    assert type(caught.value.__cause__) is RequestError
    message = f"the server answered 404: The model 'other' does not exist. This server has 'demo'. ({server.url})"
    assert str(caught.value.__cause__) == message


def test_a_request_that_the_library_refuses_is_not_an_error_of_the_service(server):
    with (
        opened(server.url) as backend,
        pytest.raises(ProgramError, match="the library anthropic refuses the request: Streaming is required") as caught,
    ):
        chat_program(gen("x", max_tokens=10**6)).run(backend=backend).text()
    assert type(caught.value.__cause__) is RequestError


def test_a_missing_key_is_an_error(server, monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with (
        Anthropic("demo", base_url=server.url) as backend,
        pytest.raises(ProgramError, match="api_key") as caught,
    ):
        chat_program(gen("x")).run(backend=backend).text()
    assert isinstance(caught.value.__cause__, ConfigError)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("", {}, "model must be"),
        ("demo", {"colour": "red"}, "colour"),
        ("demo", {"api_key": "a", "config": {}}, "at most one of"),
    ],
)
def test_wrong_arguments_are_refused(model, options, says):
    with pytest.raises(ConfigError, match=says):
        Anthropic(model, **options)


@pytest.mark.parametrize(("backend", "package"), [("Anthropic", "anthropic"), ("LiteLLM", "litellm")])
def test_a_missing_library_names_the_extra(backend, package):
    code = f"import sys; sys.modules['{package}'] = None; from graftlm import {backend}; {backend}('anthropic/any')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ConfigError: {backend} needs the package {package}" in done.stderr
    assert f"pip install 'graftlm[{package}]'" in done.stderr


def test_flush_cache_is_refused(backend):
    with pytest.raises(UnsupportedFeatureError, match="flush_cache"):
        flush_cache(backend)


def test_a_closed_backend_connects_again(server):
    backend = opened(server.url)
    for _ in range(2):
        assert chat_program(gen("x")).run(backend=backend, temperature=0)["x"]
        backend.close()
        backend.close()


# -- A scripted service, for answers that graftlm's server never gives


class Service(AppServer):
    """A Messages API that records the bodies of requests and gives a scripted answer.

    Attributes:
        bodies: bodies of all requests so far.
        active: number of unanswered requests.
    """

    def __init__(self, answer):
        self.bodies, self.active, self._answer = [], 0, answer
        app = web.Application()
        app.router.add_post("/v1/messages", self._handle)
        super().__init__(app)

    async def _handle(self, request):
        self.bodies.append(await request.json())
        self.active += 1
        try:
            return await self._answer(request)
        finally:
            self.active -= 1


def message(*blocks, stop_reason="end_turn"):
    usage = {"input_tokens": 7, "output_tokens": 3, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 1}
    fields = {"id": "m", "type": "message", "role": "assistant", "model": "demo", "stop_sequence": None}
    return fields | {"content": list(blocks), "stop_reason": stop_reason, "usage": usage}


async def short_answer(request):
    return web.json_response(message({"type": "text", "text": "Five."}))


@pytest.fixture
def recorded():
    with Service(short_answer) as service:
        yield service


def test_thinking_is_separated_and_all_tokens_are_counted():
    async def answer(request):
        thinking = {"type": "thinking", "thinking": "2 + 3", "signature": "s"}
        return web.json_response(message(thinking, {"type": "text", "text": "Fi"}, {"type": "text", "text": "ve."}))

    with Service(answer) as service, opened(service.url) as backend:
        state = chat_program(gen("x")).run(backend=backend)
        meta = state.get_meta_info("x")
    assert (state["x"], meta["reasoning_content"]) == ("Five.", "2 + 3")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (10, 2, 3)


@pytest.mark.parametrize(
    ("status", "type_", "kind"),
    [(529, "overloaded_error", UnavailableError), (403, "permission_error", RequestError)],
)
def test_a_refusal_has_the_services_message(status, type_, kind):
    async def answer(request):
        body = {"type": "error", "error": {"type": type_, "message": "not today"}}
        return web.json_response(body, status=status)

    says = f"the server answered {status}: not today"
    with (
        Service(answer) as service,
        opened(service.url) as backend,
        pytest.raises(ProgramError, match=says) as caught,
    ):
        chat_program(gen("x")).run(backend=backend).text()
    assert type(caught.value.__cause__) is kind


START = {"type": "message_start", "message": message(stop_reason=None)}
TEXT = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Fi"}}
BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}


@pytest.mark.parametrize(
    ("last", "says", "kind"),
    [
        ({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, "busy", UnavailableError),
        ({"type": "error", "error": {"type": "api_error", "message": "broken"}}, "broken", RequestFailedError),
        (None, "ended a stream before its text was complete", UnavailableError),
        ("not json", "another format", EngineError),
    ],
)
def test_a_stream_that_fails_is_an_error(last, says, kind):
    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in (START, BLOCK, TEXT, *([last] if last else [])):
            name = event["type"] if isinstance(event, dict) else "message_delta"
            data = json.dumps(event) if isinstance(event, dict) else event
            await response.write(f"event: {name}\ndata: {data}\n\n".encode())
        return response

    with Service(answer) as service, opened(service.url) as backend:
        state = chat_program(gen("x")).run(backend=backend, stream=True)
        with pytest.raises(ProgramError, match=says) as caught:
            "".join(state.text_iter())
    assert type(caught.value.__cause__) is kind


async def never(request):
    await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
def test_a_silent_service_times_out(stream):
    with Service(never) as service, opened(service.url, timeout=0.2) as backend:
        with pytest.raises(ProgramError, match="did not answer in time") as caught:
            chat_program(gen("x")).run(backend=backend, stream=stream)["x"]
        wait_until(lambda: service.active == 0, 10.0, "the end of the request")
    assert isinstance(caught.value.__cause__, RequestTimeoutError)
    assert not str(caught.value.__cause__).endswith(": ")


@pytest.mark.parametrize("ends", ["cancel", "drop"])
def test_an_unreferenced_run_leaves_no_request(ends):
    with Service(never) as service, opened(service.url) as backend:
        state = chat_program(gen("x")).run(backend=backend, stream=True)
        wait_until(lambda: service.active == 1, 10.0, "a request")
        if ends == "cancel":
            state.cancel()
            with pytest.raises(ProgramCancelledError):
                state.text()
        del state
        wait_until(lambda: service.active == 0, 10.0, "the end of the request")


def test_at_most_max_requests_are_active():
    with Service(never) as service, opened(service.url, max_requests=2) as backend:
        states = [chat_program(gen("x")).run(backend=backend, stream=True) for _ in range(4)]
        wait_until(lambda: service.active == 2, 10.0, "two requests")
        assert len(service.bodies) == 2
        for state in states:
            state.cancel()
        wait_until(lambda: service.active == 0, 10.0, "the end of the requests")
