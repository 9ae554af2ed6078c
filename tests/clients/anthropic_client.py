"""Anthropic's package: messages, streams, tools, structured answers, token counts, errors."""

import json

import anthropic
import checks
from checks import ANSWER, QUESTION, WEATHER, check, matches_weather, raises

client = anthropic.Anthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"model": "demo", "messages": MESSAGES, "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER}


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


@check
def message():
    """a message: text, stop reason, usage"""
    answer = client.messages.create(**GREEDY)
    assert (text_of(answer), answer.stop_reason) == (ANSWER, "end_turn")
    assert answer.usage.output_tokens > 0


@check
def system():
    """a system prompt and several turns"""
    turns = [*MESSAGES, {"role": "assistant", "content": ANSWER}, *MESSAGES]
    assert text_of(client.messages.create(**GREEDY | {"messages": turns}, system="Answer in one sentence."))


@check
def stream():
    """a streamed message has the text and the usage of the whole one"""
    with client.messages.stream(**GREEDY) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == ANSWER
    assert final.usage.output_tokens == client.messages.create(**GREEDY).usage.output_tokens


@check
async def asynchronous():
    """the asynchronous client, streaming"""
    async with (
        anthropic.AsyncAnthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0) as own,
        own.messages.stream(**GREEDY) as events,
    ):
        assert "".join([text async for text in events.text_stream]) == ANSWER


@check
def tools():
    """a required call, its result, and the answer to it"""
    fields = GREEDY | {"tools": [TOOL]}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    called = client.messages.create(**fields, tool_choice=choice)
    (call,) = (block for block in called.content if block.type == "tool_use")
    assert called.stop_reason == "tool_use"
    assert matches_weather(call.input)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": called.content}, result]
    assert text_of(client.messages.create(**fields | {"messages": turns}))


@check
def streamed_tools():
    """a streamed call has the input of the whole one"""
    fields = GREEDY | {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = [block.input for block in client.messages.create(**fields).content if block.type == "tool_use"]
    with client.messages.stream(**fields) as events:
        parts = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == whole
    assert json.loads("".join(parts)) == whole[0]


@check
def structured():
    """output_config with a JSON schema"""
    form = {"format": {"type": "json_schema", "schema": WEATHER}}
    assert matches_weather(json.loads(text_of(client.messages.create(**GREEDY, output_config=form))))


@check
def count():
    """count_tokens equals the usage of the message"""
    counted = client.messages.count_tokens(model="demo", messages=MESSAGES, system="Be brief.", tools=[TOOL])
    usage = client.messages.create(**GREEDY, system="Be brief.", tools=[TOOL]).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check
def stop_reasons():
    """max_tokens and stop_sequence"""
    assert client.messages.create(**GREEDY | {"max_tokens": 2}).stop_reason == "max_tokens"
    stopped = client.messages.create(**GREEDY, stop_sequences=["="])
    assert (stopped.stop_reason, stopped.stop_sequence, text_of(stopped)) == ("stop_sequence", "=", "2 + 3 ")


@check
def errors():
    """errors are the package's classes: 400, 401, 404"""
    raises(anthropic.BadRequestError, client.messages.create, **GREEDY | {"max_tokens": 0})
    long = GREEDY | {"messages": [{"role": "user", "content": "one two " * 5000}]}
    raises(anthropic.BadRequestError, client.messages.create, **long)
    raises(anthropic.NotFoundError, client.messages.create, **GREEDY | {"model": "other"})
    raises(anthropic.AuthenticationError, client.with_options(api_key="wrong").messages.create, **GREEDY)


if __name__ == "__main__":
    checks.main("anthropic")
