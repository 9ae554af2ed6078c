"""An output limit that exceeds the context is refused, or cut with `server.clip_max_tokens`."""

import httpx2
import pytest

from graftlm.testing.server_process import ServerProcess

CHAT = [{"role": "user", "content": "What is 2 plus 2?"}]
#: Path -> a request, its limit's place, and how it is called in an error.
REQUESTS = {
    "/v1/chat/completions": ({"messages": CHAT, "temperature": 0}, "max_tokens", "max_tokens"),
    "/v1/completions": ({"prompt": "One", "stop": ["."]}, "max_tokens", "max_tokens"),
    "/v1/responses": ({"input": "What is 2 plus 2?", "temperature": 0}, "max_output_tokens", "max_output_tokens"),
    "/generate": ({"text": "One"}, "sampling_params", "sampling_params.max_new_tokens"),
}


@pytest.fixture(scope="module")
def servers():
    def config(**server):
        return {"model": {"path": "demo", "context_len": 64}, "memory": {"kv_tokens": 1024}, "server": server}

    environment = {"OMP_NUM_THREADS": "1"}
    with (
        ServerProcess(config(), environment=environment) as strict,
        ServerProcess(config(clip_max_tokens=True), environment=environment) as clipping,
    ):
        yield strict, clipping


def post(server, path, max_tokens, **fields):
    body, name, _ = REQUESTS[path]
    limit = {"max_new_tokens": max_tokens, "temperature": 0} if name == "sampling_params" else max_tokens
    return httpx2.post(server.url + path, json=body | {name: limit} | fields, timeout=60)


@pytest.mark.parametrize("path", REQUESTS)
def test_a_limit_beyond_the_context_is_refused_or_cut(servers, path):
    strict, clipping = servers
    for max_tokens in (64, 100_000):
        refused = post(strict, path, max_tokens)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert "maximum context length is 64 tokens" in error["message"]
        assert (error["param"], error["code"]) == (REQUESTS[path][2], "context_length_exceeded")
        assert post(clipping, path, max_tokens).status_code == 200
    assert post(strict, path, 16).status_code == 200


def test_a_default_limit_is_cut(servers):
    strict, _ = servers
    answer = httpx2.post(strict.url + "/generate", json={"text": "One"}, timeout=60)
    assert answer.status_code == 200  # the default of max_new_tokens is 128
    text = httpx2.post(strict.url + "/v1/completions", json={"prompt": "2 " * 25}, timeout=60)
    assert text.status_code == 200


def test_a_prompt_that_is_too_long_names_the_context(servers):
    for prompt in ("2 " * 100, "2 " * 100_000):
        error = httpx2.post(servers[0].url + "/v1/completions", json={"prompt": prompt}, timeout=60).json()["error"]
        assert "maximum context length is 64 tokens" in error["message"]
        assert error["code"] == "context_length_exceeded"
