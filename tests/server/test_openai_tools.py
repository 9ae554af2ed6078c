"""Tool calls and constrained answers, tested with OpenAI's own client and a real server."""

import json
import re

import openai
import pytest
from pydantic import BaseModel

CHAT = [{"role": "user", "content": "What is 2 plus 2?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ADD = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def tool(name, parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("get_weather", WEATHER, description="Tells the weather.", strict=True), tool("add", ADD)]
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def ask(client, messages=CHAT, **fields):
    given = {"model": "demo", "temperature": 0, "max_tokens": 100} | fields
    return client.chat.completions.create(messages=messages, **given)


def one_call(answer):
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    return call


def refused(client, **fields):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    return caught.value


def test_a_required_call_matches_its_schema(client):
    call = one_call(ask(client, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False))
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather"
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)
    assert arguments.keys() == {"city", "days"}
    assert 1 <= arguments["days"] <= 5


def test_the_requested_tool_is_called(client):
    call = one_call(ask(client, tools=TOOLS, tool_choice=NAMED))
    assert (call.function.name, json.loads(call.function.arguments)["a"] in (1, 2)) == ("add", True)


def test_the_model_may_answer_without_a_call(client):
    (choice,) = ask(client, tools=TOOLS).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("2 + 2 = 4.", None, "stop")


def test_parallel_calls_that_are_required_include_at_least_one(client):
    (choice,) = ask(client, tools=TOOLS, tool_choice="required").choices
    assert choice.message.tool_calls


def test_with_tool_choice_none_no_tool_is_called(client):
    (choice,) = ask(client, tools=TOOLS, tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == ("2 + 2 = 4.", None)


@pytest.mark.parametrize("choice", [NAMED, "auto"])
def test_a_stream_has_the_content_and_calls_of_the_whole_answer(client, choice):
    fields = {"tools": TOOLS, "tool_choice": choice, "seed": 1}
    whole = ask(client, **fields).choices[0]
    deltas = [chunk.choices[0] for chunk in ask(client, stream=True, **fields)]
    parts = [part for choice in deltas for part in choice.delta.tool_calls or ()]
    assert deltas[-1].finish_reason == whole.finish_reason
    assert "".join(choice.delta.content or "" for choice in deltas) == (whole.message.content or "")
    calls = whole.message.tool_calls or []
    assert [part.function.name for part in parts if part.id] == [call.function.name for call in calls]
    assert all(part.function.name is None for part in parts if not part.id)
    assert "".join(part.function.arguments for part in parts) == "".join(call.function.arguments for call in calls)


@pytest.mark.parametrize("num_tokens", [1, 3, 6])
def test_the_incomplete_beginning_of_a_call_is_not_content(client, num_tokens):
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": num_tokens}
    (choice,) = ask(client, **fields).choices
    assert (choice.finish_reason, choice.message.content or "", choice.message.tool_calls) == ("length", "", None)
    deltas = [chunk.choices[0] for chunk in ask(client, stream=True, **fields)]
    assert deltas[-1].finish_reason == "length"
    assert not any(choice.delta.content or choice.delta.tool_calls for choice in deltas)


def test_a_call_cut_by_a_stop_string_is_not_reported_as_a_call(client):
    fields = {"tools": TOOLS, "tool_choice": NAMED, "stop": ["a"]}
    (choice,) = ask(client, **fields).choices
    (*_, last) = ask(client, stream=True, **fields)
    assert choice.finish_reason == last.choices[0].finish_reason == "stop"
    assert not choice.message.content


def test_the_stream_helper_joins_the_parts_of_a_call(client):
    fields = {"model": "demo", "messages": CHAT, "temperature": 0, "tools": TOOLS[:1], "tool_choice": "required"}
    with client.chat.completions.stream(**fields, parallel_tool_calls=False) as events:
        events.until_done()
        call = one_call(events.get_final_completion())
    assert call.function.parsed_arguments.keys() == {"city", "days"}


def test_a_conversation_continues_with_the_result_of_a_tool(client):
    called = ask(client, tools=TOOLS, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "4"}
    messages = [*CHAT, called.model_dump(exclude_none=True), result]
    without = ask(client, messages=[*CHAT, result], tools=TOOLS)
    answer = ask(client, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens


def test_each_of_several_answers_has_its_own_call_ids(client):
    answer = ask(client, tools=TOOLS, tool_choice=NAMED, n=3, temperature=1)
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 3


def test_null_has_the_effect_of_an_absent_field(client):
    plain = {"type": "function", "function": {"name": "f"}}
    nulls = tool("f", None, description=None, strict=None)
    call = {"id": "c", "type": "function", "function": {"name": "f"}}
    done = {"role": "tool", "tool_call_id": "c", "content": "4"}
    spelt = [*CHAT, {"role": "assistant", "tool_calls": [call | {"function": {"name": "f", "arguments": None}}]}, done]
    absent = [*CHAT, {"role": "assistant", "tool_calls": [call]}, done]
    one, other = (
        ask(client, messages=messages, tools=[given], tool_choice=choice, parallel_tool_calls=parallel)
        for messages, given, choice, parallel in ((spelt, nulls, None, None), (absent, plain, "auto", True))
    )
    assert one.choices[0].message.content == other.choices[0].message.content
    assert one.usage.prompt_tokens == other.usage.prompt_tokens
    assert ask(client, tools=None, response_format=None, extra_body={"choice": None, "strict": None}).choices


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools.1.function.name"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools.0.function.parameters.type"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "txt"}}})]}, "tools.0.function.parameters"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<"]}}, "response_format.structures"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"choice": ["a"]}}, "response_format"),
    ],
)
def test_an_impossible_request_is_refused_with_its_field(client, fields, param):
    assert refused(client, **fields).param == param


def test_unenforceable_schema_parts_are_refused_for_strict_tools_and_reported_for_others(client):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    error = refused(client, tools=[tool("f", schema, strict=True)])
    assert error.param == "tools.0.function.parameters"
    assert "$.properties.a.uniqueItems" in error.message
    answer = ask(client, tools=[tool("g", ADD, strict=True), tool("f", schema)])
    named = ["tools[1].function.parameters.properties.a.uniqueItems"]
    assert answer.choices[0].message.content
    assert answer.model_extra["unenforced"] == named
    first, *_ = ask(client, tools=[tool("g", ADD, strict=True), tool("f", schema)], stream=True)
    assert first.model_extra["unenforced"] == named


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"extra_body": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"extra_body": {"regex": "[ab]{3}", "grammar_backend": "xgrammar"}}, "[ab]{3}"),
        ({"extra_body": {"ebnf": 'root ::= "x" | "y"'}}, "x|y"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "2", "schema": {"const": 7}, "end": "!"}],
                    "triggers": ["2"],
                }
            },
            "27!.*",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<n>", "schema": {"const": 7}, "end": "</n>"}],
                    "triggers": ["<n>"],
                    "at_least_one": True,
                    "stop_after_first": True,
                }
            },
            "<n>7</n>",
        ),
    ],
)
def test_an_answer_matches_the_requested_grammar(client, fields, pattern):
    content = ask(client, **fields).choices[0].message.content
    assert re.fullmatch(pattern, content, re.DOTALL), content


def test_an_answer_lists_the_schema_parts_that_are_not_enforced(client):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    wanted = {"type": "json_schema", "json_schema": {"name": "list", "strict": False, "schema": schema}}
    assert ask(client, response_format=wanted).model_extra["unenforced"] == ["$.uniqueItems"]
    assert "unenforced" not in ask(client, response_format={"type": "json_object"}).model_extra


def test_a_schema_in_an_extra_field_may_be_not_strict(client):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    answer = ask(client, extra_body={"json_schema": schema, "strict": False})
    assert answer.model_extra["unenforced"] == ["$.uniqueItems"]
    for strict in (True, None):
        assert "$.uniqueItems" in refused(client, extra_body={"json_schema": schema, "strict": strict}).message


class Sum(BaseModel):
    total: int


def test_an_answer_is_parsed_into_a_model(client):
    answer = client.chat.completions.parse(model="demo", messages=CHAT, temperature=0, response_format=Sum)
    assert isinstance(answer.choices[0].message.parsed, Sum)


def test_a_completion_is_one_of_the_choices(client):
    answer = client.completions.create(model="demo", prompt="2 + 2 =", extra_body={"choice": ["four", "five"]})
    assert answer.choices[0].text in ("four", "five")
