"""An output limit that exceeds the context is refused, or cut with `server.clip_max_tokens`."""

import httpx2
import pytest

#: A prompt that leaves room for fewer tokens than the default limit of /generate, 128, in the context.
CONTEXT_LEN = 2048
LONG = "2 " * ((CONTEXT_LEN - 64) // 2)
CHAT = [{"role": "user", "content": LONG}]
#: Path -> a request, its limit's place, and how it is called in an error.
REQUESTS = {
    "/v1/chat/completions": ({"messages": CHAT, "temperature": 0}, "max_tokens", "max_tokens"),
    "/v1/completions": ({"prompt": LONG, "temperature": 0}, "max_tokens", "max_tokens"),
    "/v1/responses": ({"input": LONG, "temperature": 0}, "max_output_tokens", "max_output_tokens"),
    "/generate": ({"text": LONG}, "sampling_params", "sampling_params.max_new_tokens"),
}


def post(server, path, max_tokens, **fields):
    body, name, _ = REQUESTS[path]
    limit = {"max_new_tokens": max_tokens, "temperature": 0} if name == "sampling_params" else max_tokens
    return httpx2.post(server.url + path, json=body | {name: limit} | fields, timeout=60)


@pytest.mark.parametrize("path", REQUESTS)
def test_a_limit_beyond_the_context_is_refused_or_cut(server, thinking_server, path):
    for max_tokens in (80, 100_000):
        refused = post(server, path, max_tokens)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert f"maximum context length is {CONTEXT_LEN} tokens" in error["message"]
        assert (error["param"], error["code"]) == (REQUESTS[path][2], "context_length_exceeded")
        assert post(thinking_server, path, max_tokens).status_code == 200  # it has `server.clip_max_tokens`
    assert post(server, path, 16).status_code == 200


def test_a_default_limit_is_cut(server):
    answer = httpx2.post(server.url + "/generate", json={"text": LONG}, timeout=60)
    assert answer.status_code == 200  # the default of max_new_tokens is 128
    assert 0 < CONTEXT_LEN - answer.json()["meta_info"]["prompt_tokens"] < 128
    text = httpx2.post(server.url + "/v1/completions", json={"prompt": LONG}, timeout=60)
    assert text.status_code == 200


def test_a_prompt_that_is_too_long_names_the_context(server):
    for prompt in ("2 " * (CONTEXT_LEN + 10), "2 " * 100_000):
        error = httpx2.post(server.url + "/v1/completions", json={"prompt": prompt}, timeout=60).json()["error"]
        assert f"maximum context length is {CONTEXT_LEN} tokens" in error["message"]
        assert error["code"] == "context_length_exceeded"
