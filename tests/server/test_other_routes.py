"""Routes that clients and routers of vLLM and SGLang call."""

import httpx2
import pytest

import graftlm


def get(server, path):
    answer = httpx2.get(server.url + path, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/ready", "/ping"])
def test_probes_have_the_answer_of_health(server, path):
    assert get(server, path) == get(server, "/health")


def test_the_version_is_returned(server):
    assert get(server, "/version") == {"version": graftlm.__version__}


def test_loads_have_the_fields_that_routers_read(server):
    body = get(server, "/v1/loads?include=core,queues")
    assert body["dp_rank_count"] == len(body["loads"]) == 1
    (load,) = body["loads"]
    assert load["dp_rank"] == 0
    assert load["num_running_reqs"] >= 0
    assert 0 <= load["token_usage"] <= 1
    assert load["max_total_num_tokens"] == get(server, "/server_info")["max_total_num_tokens"]


def test_tokenize_and_detokenize_exist_without_a_version_in_the_path(server):
    tokens = httpx2.post(server.url + "/tokenize", json={"prompt": "One two"}, timeout=60).json()
    versioned = httpx2.post(server.url + "/v1/tokenize", json={"prompt": "One two"}, timeout=60).json()
    assert tokens == versioned
    text = httpx2.post(server.url + "/detokenize", json={"tokens": tokens["tokens"]}, timeout=60).json()
    assert text["prompt"] == text["text"] == "One two"
