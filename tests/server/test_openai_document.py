"""The OpenAPI document, compared with real answers."""

import json

import httpx2
import jsonschema
import pytest

CHAT = [{"role": "user", "content": "What is 2 plus 2?"}]
LOGPROBS = {"logprobs": True, "top_logprobs": 2}


@pytest.fixture(scope="module")
def document(server):
    return httpx2.get(server.url + "/openapi.json", timeout=60).json()


def schema_of(document, method, path, media_type):
    return document["paths"][path][method]["responses"]["200"]["content"][media_type]["schema"]


def check(value, schema):
    jsonschema.validate(value, schema)
    unknown = value.keys() - schema["properties"].keys()
    assert not unknown


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "n": 2}),
        ("/v1/chat/completions", {"messages": CHAT, **LOGPROBS}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": "a b", "logprobs": 2, "echo": True}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
        ("/v1/tokenize", {"messages": CHAT}),
        ("/v1/tokenize", {"prompt": ["a", "b"]}),
        ("/v1/detokenize", {"tokens": [300]}),
        ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [300, 301]}),
        ("/v1/score", {"text_1": "a", "text_2": "b", "label_token_ids": [300, 301]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "label_token_ids": [300, 301]}),
    ],
)
def test_an_answer_has_the_documented_schema(server, document, path, body):
    answer = httpx2.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    check(answer.json(), schema_of(document, "post", path, "application/json"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, **LOGPROBS}),
        ("/v1/completions", {"prompt": "a b", "logprobs": 1}),
    ],
)
def test_events_have_the_documented_schema(server, document, path, body):
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    answer = httpx2.post(server.url + path, json=body, timeout=60)
    *events, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    for event in events:
        check(json.loads(event.removeprefix("data: ")), schema_of(document, "post", path, "text/event-stream"))


@pytest.mark.parametrize(("path", "url"), [("/v1/models", "/v1/models"), ("/v1/models/{model}", "/v1/models/demo")])
def test_the_model_has_the_documented_schema(server, document, path, url):
    answer = httpx2.get(server.url + url, timeout=60)
    check(answer.json(), schema_of(document, "get", path, "application/json"))


def test_every_route_documents_its_errors(document):
    routes = [
        route
        for path, routes in document["paths"].items()
        for route in routes.values()
        if path.startswith("/v1/") and "openai" in route["tags"]
    ]
    assert len(routes) == 16
    for route in routes:
        assert {"400", "404", "408", "413", "429", "503"} <= route["responses"].keys()
        assert "422" not in route["responses"]


def test_every_field_that_openai_does_not_have_is_described(document):
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    ours = ("top_k", "min_p", "regex", "cache_salt", "priority", "timeout_s", "request_id", "chat_template_kwargs")
    assert all(fields[name].get("description") for name in ours)


def test_every_reference_has_a_target(document):
    found = set()

    def walk(part):
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                found.add(part["$ref"])
            for value in part.values():
                walk(value)
        elif isinstance(part, list):
            for value in part:
                walk(value)

    walk(document)
    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert found
    assert found <= names
