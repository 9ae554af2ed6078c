import json

import httpx2
import pytest

PROMPT = {"text": "the quick brown fox jumps over the lazy dog", "cache_salt": "pins"}


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def run(client):
    body = PROMPT | {"sampling_params": {"max_new_tokens": 1}}
    return client.post("/generate", json=body).json()["meta_info"]


def test_a_prefix_is_pinned_and_unpinned(client):
    client.post("/flush_cache")
    assert client.post("/pin_prefix", json=PROMPT).json() == {"pinned_tokens": [0]}
    num_tokens = run(client)["prompt_tokens"]
    assert client.post("/pin_prefix", json=PROMPT | {"ttl_s": 60}).json() == {"pinned_tokens": [num_tokens]}
    (snapshot,) = client.get("/cache_snapshot").json()["replicas"]
    assert [node["pins"] for node in snapshot["nodes"] if node["namespace"] == "pins" and node["pins"]] == [1]
    assert client.post("/unpin_prefix", json=PROMPT).json() == {"was_pinned": True}
    assert client.post("/unpin_prefix", json=PROMPT).json() == {"was_pinned": False}


def test_the_snapshot_shows_the_cached_prefixes(client):
    client.post("/flush_cache")
    num_tokens = run(client)["prompt_tokens"]
    (snapshot,) = client.get("/cache_snapshot").json()["replicas"]
    num_cached = sum(len(node["token_ids"]) for node in snapshot["nodes"])
    assert num_cached >= num_tokens
    assert snapshot["evictable_pages"] * snapshot["page_size"] == num_cached
    assert {node["parent"] for node in snapshot["nodes"]} <= {None} | {node["id"] for node in snapshot["nodes"]}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "either"),
        ({"text": "a", "input_ids": [1]}, "either"),
        ({"text": ""}, "empty"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [10**9]}, "vocabulary"),
        ({"text": "a", "ttl_s": 0}, "ttl_s"),
        ({"text": "a", "ttl_s": "soon"}, "ttl_s"),
        ({"text": "a", "ttl": 3}, "ttl"),
    ],
)
def test_an_invalid_pin_is_refused(client, body, word):
    response = client.post("/pin_prefix", json=body)
    assert response.status_code == 400, response.text
    assert word in json.dumps(response.json())
