"""Reasoning in chats, with a chat template that makes the model reason."""

import json

import httpx2
import openai
import pytest

from graftlm.demo import demo_checkpoint
from graftlm.testing.thinking_checkpoint import THINK_END_ID, THINK_ID
from graftlm.tokenization import Tokenizer

CHAT = [{"role": "user", "content": "What is 2 plus 2?"}]
#: The template opens the reasoning if this argument is set.
OPENS = {"chat_template_kwargs": {"opens": True}}


@pytest.fixture(scope="module")
def client(thinking_server):
    """A client of the demo model with reasoning tags in its vocabulary."""
    with openai.OpenAI(base_url=thinking_server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def ask(client, messages=CHAT, extra_body=OPENS, **fields):
    fields = {"temperature": 0, "max_tokens": 40} | fields
    return client.chat.completions.create(model="demo", messages=messages, extra_body=extra_body, **fields)


def test_reasoning_is_separated_in_whole_and_streamed_answers(client):
    message = ask(client).choices[0].message
    assert message.reasoning_content
    assert message.content is None
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert not any(delta.content for delta in deltas)


def test_reasoning_stays_in_the_content_on_request(client):
    message = ask(client, extra_body=OPENS | {"separate_reasoning": False}).choices[0].message
    assert message.content
    assert not hasattr(message, "reasoning_content")


PARAMETERS = {"type": "object", "properties": {"n": {"enum": [2, 4]}}, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "tell", "strict": True, "parameters": PARAMETERS}}]
TAG = {"triggers": ["<n>"], "structures": [{"begin": "<n>", "schema": {"enum": [2, 4]}, "end": "</n>"}]}
GRAMMARS = {
    "choice": {"choice": ["yes", "no"]},
    "regex": {"regex": "yes|no"},
    "ebnf": {"ebnf": 'root ::= "yes" | "no"'},
    "json_schema": {"json_schema": {"enum": ["yes", "no"]}},
    "outlines": {"regex": "yes|no", "grammar_backend": "outlines"},
    "tag": {"structural_tag": TAG | {"at_least_one": True, "stop_after_first": True}},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "tell"}}},
}
#: Either the prompt or the model begins the reasoning.
BEGINNINGS = {"prompt": (OPENS, {}), "model": ({}, {str(THINK_ID): 10})}


def answer_of(message):
    """Return the answer in a message: its content, or the arguments of its calls."""
    calls = message.tool_calls or []
    assert bool(calls) != bool(message.content)
    return message.content or [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_begins_after_the_reasoning(client, name, beginning):
    template, bias = BEGINNINGS[beginning]
    body = template | GRAMMARS[name]
    bias = bias | {str(THINK_END_ID): 12}
    given = {"temperature": 1.0, "seed": 3, "n": 8, "max_tokens": 90, "logit_bias": bias}
    choices = ask(client, extra_body=body, **given).choices
    answered = [choice for choice in choices if choice.finish_reason != "length"]
    assert len(answered) >= 3
    assert any(getattr(choice.message, "reasoning_content", None) for choice in answered)
    for choice in answered:
        answer = answer_of(choice.message)
        if "tools" in body:
            assert [(called, json.loads(given)["n"] in (2, 4)) for called, given in answer] == [("tell", True)]
            assert choice.finish_reason == "tool_calls"
        else:
            assert answer.strip('"') in ("yes", "no", "<n>2</n>", "<n>4</n>")
    for choice in choices:
        assert "</think>" not in (getattr(choice.message, "reasoning_content", None) or "")


@pytest.mark.parametrize("stops", [False, True])
def test_triggers_have_no_effect_within_the_reasoning(client, stops):
    trigger = {"triggers": [" "], "structures": [{"begin": " ", "schema": {"enum": [2, 4]}, "end": "!"}]}
    body = OPENS | {"structural_tag": trigger | {"stop_after_first": stops}}
    message = ask(client, extra_body=body).choices[0].message
    assert message.reasoning_content.count(" ") > 3
    assert message.content is None
    no_special = {str(token_id): -100 for token_id in range(7)}
    plain = ask(client, logit_bias=no_special).choices[0].message
    assert message.reasoning_content == plain.reasoning_content


def test_an_answer_does_not_end_within_the_reasoning(client):
    body = OPENS | {"choice": ["yes", "no"]}
    choice = ask(client, extra_body=body, logit_bias={"1": 100, "6": 100}, max_tokens=20).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content is None


def test_reasoning_that_the_client_begins_is_continued(client):
    chat = [*CHAT, {"role": "assistant", "content": "<think>Well, two and"}]
    body = {"continue_final_message": True, "choice": ["yes", "no"]}
    given = {"extra_body": body, "max_tokens": 60, "seed": 1, "temperature": 1.0, "logit_bias": {str(THINK_END_ID): 12}}
    choice = ask(client, chat, **given).choices[0]
    assert choice.message.content in ("yes", "no")
    assert choice.message.reasoning_content
    deltas = [chunk.choices[0].delta for chunk in ask(client, chat, stream=True, **given)]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == choice.message.reasoning_content


@pytest.mark.parametrize(
    ("begun", "rest", "ends"),
    [("<think>abc</think", ">", True), ("<think>abc</", "think>", False), ("<think>a <", "/think>", False)],
)
def test_a_begun_message_may_be_cut_within_the_end_tag_of_its_reasoning(client, begun, rest, ends):
    """The next tokens spell the end tag. They are likely only because of the bias."""
    chat = [*CHAT, {"role": "assistant", "content": begun}]
    ids = Tokenizer.load(demo_checkpoint()).encode_inside(rest)
    bias = {str(token_id): 100 - 10 * i for i, token_id in enumerate(ids)}
    body = {"continue_final_message": True, "json_schema": {"type": "boolean"}}
    given = {"extra_body": body, "temperature": 1.0, "logit_bias": bias, "n": 4, "frequency_penalty": 2, "seed": 5}
    choices = ask(client, chat, max_tokens=60, **given).choices
    assert any(choice.finish_reason == "stop" for choice in choices) or not ends
    for choice in choices:
        if choice.finish_reason == "stop":
            assert choice.message.content in ("true", "false")
        else:
            assert any(answer.startswith(choice.message.content or "") for answer in ("true", "false"))


def test_the_grammar_applies_to_the_whole_output_if_reasoning_is_not_separated(client):
    body = OPENS | {"ebnf": 'root ::= "yes"', "separate_reasoning": False}
    assert ask(client, extra_body=body).choices[0].message.content == "yes"
    body = OPENS | {"json_schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(openai.BadRequestError, match=r"json_schema: \$\.uniqueItems"):
        ask(client, extra_body=body)


@pytest.mark.parametrize("end", ["</think>", "no such end"])
def test_a_grammar_of_generate_begins_after_the_reasoning(client, end):
    params = {
        "regex": "yes|no",
        "reasoning_end": end,
        "max_new_tokens": 40,
        "temperature": 0,
        "logit_bias": {"2047": 100},
    }
    url = str(client.base_url).replace("/v1/", "/generate")
    answer = httpx2.post(url, json={"text": "Well,", "sampling_params": params}, timeout=60).json()
    assert answer["text"].endswith(("</think>\nyes", "</think>\nno")) == (end == "</think>")
    assert answer["meta_info"]["finish_reason"]["type"] == ("stop" if end == "</think>" else "length")
