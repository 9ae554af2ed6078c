"""Requests and events of each API."""

import json
from array import array

import msgspec
import pytest

from graftlm.bench.apis import API_TYPES, Event, RequestOptions, error_text
from graftlm.bench.prompts import ChatPrompt, TextPrompt, TokenPrompt, WorkItem

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def api(name, ignore_eos=True):
    return API_TYPES[name](RequestOptions(model="m", temperature=0.5, ignore_eos=ignore_eos))


@pytest.mark.parametrize(
    ("name", "prompt", "fields"),
    [
        ("native", TextPrompt("a"), {"text": "a"}),
        ("native", TokenPrompt(array("i", [1, 2])), {"input_ids": [1, 2]}),
        ("openai-completions", TextPrompt("a"), {"prompt": "a"}),
        ("openai-completions", TokenPrompt(array("i", [1, 2])), {"prompt": [1, 2]}),
        ("openai-chat", TextPrompt("a"), {"messages": [{"role": "user", "content": "a"}]}),
        ("openai-chat", ChatPrompt(CHAT), {"messages": CHAT}),
    ],
)
def test_a_request_has_the_fields_of_its_api(name, prompt, fields):
    body = json.loads(api(name).body(WorkItem(prompt, 7)))
    native = {
        "sampling_params": {"max_new_tokens": 7, "temperature": 0.5, "ignore_eos": True},
        "stream": True,
    }
    openai = {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert body == fields | (native if name == "native" else openai)


@pytest.mark.parametrize("name", ["openai-completions", "openai-chat"])
def test_ignore_eos_is_sent_only_if_set(name):
    assert "ignore_eos" not in json.loads(api(name, ignore_eos=False).body(WorkItem(TextPrompt("a"), 1)))


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.mark.parametrize(
    ("name", "event", "read"),
    [
        (
            "native",
            {"text": "a", "output_ids": [1, 2], "meta_info": USAGE | {"cached_tokens": 1, "finish_reason": None}},
            Event(output_tokens=2, prompt_tokens=3, cached_tokens=1),
        ),
        (
            "native",
            {"text": "a", "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length", "length": 2}}},
            Event(output_tokens=2, finish_reason="length"),
        ),
        (
            "native",
            {"meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}},
            Event(finish_reason="abort", error="gone"),
        ),
        ("native", {"error": {"message": "boom", "type": "x"}}, Event(error="boom")),
        ("openai-chat", {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Event()),
        ("openai-chat", {"choices": [{"delta": {"content": "a"}, "logprobs": None}]}, Event(has_text=True)),
        ("openai-chat", {"choices": [{"delta": {"reasoning_content": "a"}}]}, Event(has_text=True)),
        ("openai-chat", {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, Event(has_text=True)),
        ("openai-chat", {"choices": [{"delta": {}, "finish_reason": "stop"}]}, Event(finish_reason="stop")),
        (
            "openai-chat",
            {"choices": [], "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}},
            Event(output_tokens=2, prompt_tokens=3, cached_tokens=1),
        ),
        (
            "openai-completions",
            {"choices": [{"text": "a"}], "usage": None},
            Event(has_text=True),
        ),
        (
            "openai-completions",
            {"choices": [{"text": "", "finish_reason": "abort"}]},
            Event(finish_reason="abort", error="the answer ended with finish_reason 'abort'"),
        ),
        ("openai-completions", {"error": "boom"}, Event(error="boom")),
    ],
)
def test_an_event_is_parsed(name, event, read):
    assert api(name).read(json.dumps(event).encode()) == read


@pytest.mark.parametrize("name", API_TYPES)
@pytest.mark.parametrize("data", [b"{", b"[]", b'{"choices": 7, "meta_info": 7}'])
def test_a_malformed_event_is_an_error(name, data):
    with pytest.raises(msgspec.MsgspecError):
        api(name).read(data)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no model x", "code": 404}}', "no model x"),
        (b'{"error": "no"}', "no"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"<html>Bad gateway</html>\n", "<html>Bad gateway</html>"),
    ],
)
def test_the_error_message_is_found_in_the_body(body, text):
    assert error_text(body) == text
