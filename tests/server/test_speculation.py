"""Speculative decoding over HTTP: equal answers, what was drafted, and the switch in a request."""

import json
import re

import pytest
import requests

from graftlm.testing.server_process import wait_until

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
FIELDS = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
SPECULATION = {"drafted_tokens", "accepted_draft_tokens"}


@pytest.fixture(scope="module")
def server(drafting_server):
    return drafting_server


def post(server, path, **fields):
    answer = requests.post(server.url + path, json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def chat(server, **fields):
    """Return the text of an answer, and what it says of drafts."""
    body = post(server, "/v1/chat/completions", model="demo", messages=CHAT, **FIELDS, **fields).json()
    details = body["usage"]["completion_tokens_details"]
    return body["choices"][0]["message"]["content"], {name: details[name] for name in SPECULATION}


def completion(server, **fields):
    body = post(server, "/v1/completions", model="demo", prompt="Once there was", **FIELDS, **fields).json()
    details = body["usage"]["completion_tokens_details"]
    return body["choices"][0]["text"], {name: details[name] for name in SPECULATION}


def generate(server, **fields):
    params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}
    body = post(server, "/generate", text="The capital of Peru", sampling_params=params).json()
    return body["text"], {name: body["meta_info"][name] for name in SPECULATION}


@pytest.mark.parametrize("ask", [chat, completion, generate])
def test_a_repeated_request_is_drafted_unless_it_declines(server, ask):
    text, counts = ask(server, speculation=False)
    assert counts == dict.fromkeys(SPECULATION, 0)
    again, counts = ask(server)
    assert again == text
    assert counts["drafted_tokens"] >= counts["accepted_draft_tokens"] > 20
    assert ask(server, speculation=False) == (text, dict.fromkeys(SPECULATION, 0))


def counts_by_drafter(server):
    """Return (metric, drafter) -> value."""
    text = requests.get(server.url + "/metrics", timeout=10).text
    found = re.findall(r'^graftlm_(\w+)_total\{drafter="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {(name, drafter): float(value) for name, drafter, value in found}


def test_metrics_agree_with_the_answers_and_no_tenant_gets_drafts_of_anothers_text(server):
    before = counts_by_drafter(server)
    expected = dict.fromkeys(SPECULATION, 0)

    def growth(name):
        now = counts_by_drafter(server)
        return {drafter: now[name, drafter] - before.get((name, drafter), 0) for drafter in ("radix", "suffix")}

    texts, drafted_by_radix = [], []
    for tenant in ("first", "first", "second", "second"):
        text, counts = chat(server, cache_salt=tenant)
        texts.append(text)
        for name in SPECULATION:
            expected[name] += counts[name]
        # The scheduler reports when it becomes idle: a moment after the answer.
        wait_until(lambda: {name: sum(growth(name).values()) for name in SPECULATION} == expected, 10, "the growth")
        drafted_by_radix.append(growth("drafted_tokens")["radix"])
    assert len(set(texts)) == 1
    assert 0 == drafted_by_radix[0] < drafted_by_radix[1] == drafted_by_radix[2] < drafted_by_radix[3]


def test_a_stream_has_the_same_text_and_ends_with_the_counts(server):
    text, _ = chat(server, speculation=False)
    answer = post(
        server,
        "/v1/chat/completions",
        model="demo",
        messages=CHAT,
        stream=True,
        stream_options={"include_usage": True},
        **FIELDS,
    )
    events = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", answer.content.decode(), re.MULTILINE)]
    parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(parts) == text
    assert events[-1]["usage"]["completion_tokens_details"]["accepted_draft_tokens"] > 20


@pytest.mark.parametrize("value", ["false", 0, []])
def test_what_is_no_boolean_is_refused(server, value):
    fields = {"model": "demo", "messages": CHAT, "speculation": value}
    answer = requests.post(server.url + "/v1/chat/completions", json=fields, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculation"
