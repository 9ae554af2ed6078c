"""Requests that OpenAI's routes refuse, and the fields that the errors name."""

import asyncio
import time

import httpx2
import numpy as np
import openai
import pytest

from graftlm.contracts import MAX_CHOICES

NOT = {"not": {}}
CHAT = [{"role": "user", "content": "What is 2 plus 2?"}]


def message(content):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": {"a": 1}}, "prompt", "string"),
        ({"prompt": None}, "prompt", "string"),
        ({"prompt": [1, "a"]}, "prompt.1", "integer"),
        ({"prompt": ["a", 1]}, "prompt.1", "string"),
        ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ({"prompt": [1.5]}, "prompt.0", "integer"),
        ({"prompt": [True]}, "prompt.0", "integer"),
        ({"prompt": [["a"]]}, "prompt.0.0", "integer"),
        ({"prompt": [[1], "a"]}, "prompt.1", "list"),
        ({"prompt": ["x"] * 5000}, "prompt", "4096"),
        ({"prompt": "x", "choice": ["x"] * (MAX_CHOICES + 1)}, "choice", str(MAX_CHOICES)),
        ({"prompt": "x", "stop": ["a", 1]}, "stop.1", "string"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a", "integer"),
        ({"prompt": "x", "temperature": 2.5}, "temperature", "2"),
        ({"prompt": "x", "seed": 2**63}, "seed", "9223372036854775807"),
        ({"prompt": "x", "stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "Unrecognized"),
        ({"prompt": "x", "one": 1}, "one", "Unrecognized"),
        ({"prompt": "x", "body": 1}, "body", "Unrecognized"),
        ({"prompt": "x", "x" * 5000: 1}, "x" * 256, "Unrecognized"),
    ],
)
def test_a_wrong_field_of_a_completion_is_reported_by_its_path(server, body, param, says):
    check(server, "/v1/completions", body, param, says)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (message(5), "messages.0.content", "string"),
        (message(["x"]), "messages.0.content.0", "object"),
        (message([{"text": "x"}]), "messages.0.content.0.type", "required"),
        (message([{"type": "text"}]), "messages.0.content.0", "has no text"),
        (message([{"type": "text", "text": 3}]), "messages.0.content.0.text", "string"),
        (message([{"type": "input_audio", "input_audio": {}}]), "messages.0.content.0", "'input_audio'"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages.0.foo", "Unrecognized"),
        ({"messages": CHAT, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'"),
        ({"messages": CHAT, "store": True}, "store", "not supported"),
        ({"messages": CHAT, "response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"messages": CHAT, "json_schema": [1]}, "json_schema", "expected an object, its text or true, got a list"),
        ({"messages": CHAT, "structural_tag": True}, "structural_tag", "expected an object or its text, got true"),
    ],
)
def test_a_wrong_field_of_a_chat_is_reported_by_its_path(server, body, param, says):
    check(server, "/v1/chat/completions", body, param, says)


def check(server, path, body, param, says):
    answer = httpx2.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == {"Unrecognized": "unknown_parameter", "not supported": "unsupported"}.get(says)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/completions", {"prompt": "x", "regex": "("}, "regex", "regex: regular expression '(', position 1: "),
        ("/v1/completions", {"prompt": "x", "json_schema": False}, "json_schema", "json_schema: $: false allows no"),
        ("/v1/chat/completions", {"messages": CHAT, "ebnf": "a"}, "ebnf", "ebnf: line 1: "),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT}}},
            "response_format",
            "json_schema: $.not: this keyword is not enforced; leave it out, or set strict to false",
        ),
        ("/generate", {"text": "x", "sampling_params": {"regex": "("}}, "sampling_params.regex", "regex: regular"),
    ],
)
def test_a_refused_grammar_is_reported_by_its_field(server, path, body, param, says):
    answer = httpx2.post(server.url + path, json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_grammar")
    assert error["message"].startswith(says)


#: The compiler measures this grammar and refuses it: each token can be read in far too many ways.
SLOW = {"regex": "(a?){1000}a{1000}"}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", **SLOW}, "regex"),
        ("/v1/chat/completions", {"messages": CHAT, **SLOW}, "regex"),
        ("/generate", {"text": "x", "sampling_params": SLOW}, "sampling_params.regex"),
    ],
)
def test_a_grammar_refused_during_compilation_is_reported_by_its_field(server, path, body, param, stream):
    answer = httpx2.post(server.url + path, json=body | {"stream": stream}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_grammar")
    assert error["message"].startswith("regex: finding the next token takes")


def test_the_json_schema_true_is_accepted(server):
    body = {"prompt": "x", "json_schema": True, "max_tokens": 1, "temperature": 0}
    answers = [httpx2.post(server.url + "/v1/completions", json=body | {"json_schema": s}) for s in (True, {}, "true")]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize("fields", [{"prompt": ["x"] * 1200}, {"prompt": ["x"] * 20, "n": 100}])
def test_a_call_larger_than_the_queue_is_refused_permanently(server, fields):
    answer = httpx2.post(server.url + "/v1/completions", json={"max_tokens": 1, **fields}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "max_queued_requests" in answer.json()["error"]["message"]


def test_one_call_may_embed_more_texts_than_the_queue_holds(client):
    texts = [f"text {i % 7}" for i in range(1100)]
    answer = client.embeddings.create(model="demo", input=texts)
    vectors = np.array([item.embedding for item in answer.data])
    assert [item.index for item in answer.data] == list(range(len(texts)))
    np.testing.assert_allclose(vectors, np.resize(vectors[:7], vectors.shape), atol=1e-4)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(texts)


async def test_a_cancelled_embeddings_call_leaves_no_request_or_page(server):
    async with httpx2.AsyncClient(base_url=server.url, timeout=0.3) as client:
        with pytest.raises(httpx2.TimeoutException):
            await client.post("/v1/embeddings", json={"input": [[i] * 900 for i in range(300, 600)]})
    async with httpx2.AsyncClient(base_url=server.url, timeout=30) as client, asyncio.timeout(10):
        while True:
            (load,) = (await client.get("/get_load")).json()
            if load["num_reqs"] == load["num_waiting_reqs"] == load["num_pages"] == 0:
                break
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "body", "param", "meant"),
    [
        ("/v1/completions", {"prompt": "x", "grammar_backened": "xgrammar"}, "grammar_backened", "grammar_backend"),
        (
            "/v1/completions",
            {"prompt": "x", "stream_options": {"include_usge": 1}},
            "stream_options.include_usge",
            "include_usage",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "max_token": 1}, "max_token", "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents", "content"),
        ("/v1/chat/completions", {"messages": CHAT, "response_format": {"typ": "text"}}, "response_format.typ", "type"),
        ("/v1/embeddings", {"input": "x", "poolling": "mean"}, "poolling", "pooling"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_nearest_name(server, path, body, param, meant):
    answer = httpx2.post(server.url + path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "unknown_parameter")
    assert error["message"] == f"Unrecognized request argument supplied: {param}; did you mean '{meant}'?"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_wrong_stop_regex_is_reported_by_its_field_and_an_empty_one_is_absent(server, path):
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    refused = httpx2.post(server.url + path, json=prompt | {"stop_regex": "x*", "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex")
    accepted = httpx2.post(server.url + path, json=prompt | {"stop_regex": "", "max_tokens": 1})
    assert accepted.status_code == 200


def test_thousands_of_unknown_fields_are_refused_quickly(server):
    body = {"prompt": "x"} | {f"max_toke{i}": 1 for i in range(20_000)}
    start = time.perf_counter()
    response = httpx2.post(server.url + "/v1/completions", json=body)
    assert response.status_code == 400
    assert "max_tokens" in response.json()["error"]["message"]
    assert time.perf_counter() - start < 2
