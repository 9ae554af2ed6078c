"""OpenAI's package: chats, completions, structured answers, tools, responses, embeddings, files, batches, errors."""

import json
import time
from typing import Literal

import checks
import openai
from checks import ANSWER, QUESTION, WEATHER, check, matches_weather, raises
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
RESPONSE = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
WEATHER_TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def add_up(usage):
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@check
def chat():
    """a chat: text, finish reason, usage"""
    answer = client.chat.completions.create(**GREEDY)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    add_up(answer.usage)


@check
def chat_stream():
    """a streamed chat has the text and the usage of the whole one"""
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    whole = client.chat.completions.create(**GREEDY)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    add_up(chunks[-1].usage)


@check
async def concurrent():
    """eight concurrent chats of the asynchronous client"""
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0) as own:
        answers = await asyncio.gather(*(own.chat.completions.create(**GREEDY) for _ in range(8)))
    assert {answer.choices[0].message.content for answer in answers} == {ANSWER}


@check
def choices_and_logprobs():
    """n choices with log-probabilities"""
    answer = client.chat.completions.create(**GREEDY | {"temperature": 1}, n=3, seed=1, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in choice.logprobs.content)


@check
def completion():
    """a completion, whole and streamed"""
    fields = {"model": "demo", "prompt": "One, two,", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**fields)
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True)) == (
        whole.choices[0].text
    )
    add_up(whole.usage)


@check
def models():
    """the list of models, and one of them"""
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "graftlm"


@check
def parse():
    """chat.completions.parse returns an object of a pydantic class"""
    answer = client.chat.completions.parse(**GREEDY, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@check
def stream_helper():
    """chat.completions.stream parses the object at the end"""
    with client.chat.completions.stream(**GREEDY, response_format=Weather) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Weather)


@check
def json_schema():
    """response_format with a JSON schema"""
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = client.chat.completions.create(**GREEDY, response_format=schema)
    assert matches_weather(json.loads(answer.choices[0].message.content))


@check
def tools():
    """a required call, its result, and the answer to it"""
    fields = GREEDY | {"tools": [WEATHER_TOOL], "parallel_tool_calls": False}
    message = client.chat.completions.create(**fields, tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    assert matches_weather(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    answer = client.chat.completions.create(**fields | {"messages": [*MESSAGES, message, result]})
    assert answer.choices[0].message.content


@check
def parsed_tools():
    """pydantic_function_tool and parse give parsed arguments"""
    named = {"type": "function", "function": {"name": "Weather"}}
    answer = client.chat.completions.parse(**GREEDY, tools=[openai.pydantic_function_tool(Weather)], tool_choice=named)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


@check
def streamed_tools():
    """a streamed call has the arguments of the whole one"""
    fields = GREEDY | {"tools": [WEATHER_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls[0].function
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
    parts = [part.function for delta in deltas for part in delta.tool_calls or ()]
    assert parts[0].name == whole.name
    assert "".join(part.arguments or "" for part in parts) == whole.arguments


@check
def response():
    """a response, retrieved, continued and deleted"""
    first = client.responses.create(**RESPONSE)
    assert first.output_text == ANSWER
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == ANSWER
    assert len(list(client.responses.input_items.list(first.id))) == 1
    second = client.responses.create(**RESPONSE, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(first.id)
    raises(openai.NotFoundError, client.responses.retrieve, first.id)


@check
def response_stream():
    """a streamed response: events in order, the text of the whole one"""
    with client.responses.stream(**RESPONSE) as events:
        seen = list(events)
        final = events.get_final_response()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert (seen[0].type, seen[-1].type) == ("response.created", "response.completed")
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == ANSWER
    assert final.output_text == ANSWER


@check
def response_parse():
    """responses.parse returns an object of a pydantic class"""
    assert isinstance(client.responses.parse(**RESPONSE, text_format=Weather).output_parsed, Weather)


@check
def response_tools():
    """a function call of a response, and its output"""
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    called = client.responses.create(**RESPONSE, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = (item for item in called.output if item.type == "function_call")
    assert matches_weather(json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    answer = client.responses.create(**RESPONSE | {"input": [output]}, tools=[tool], previous_response_id=called.id)
    assert answer.output_text


@check
def input_tokens():
    """responses.input_tokens.count equals the usage of the response"""
    counted = client.responses.input_tokens.count(model="demo", input=QUESTION)
    assert counted.input_tokens == client.responses.create(**RESPONSE).usage.input_tokens


@check
def embeddings():
    """embeddings: a list of texts, two encodings"""
    fields = {"model": "demo", "input": ["a fox", "a dog"]}
    packed = client.embeddings.create(**fields)  # the package asks for base64 and decodes it
    plain = client.embeddings.create(**fields, encoding_format="float")
    assert len(packed.data) == 2
    for one, other in zip(packed.data, plain.data, strict=True):
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-6


@check
def files_and_batches():
    """a file, a batch over it, and its results"""
    body = {key: value for key, value in GREEDY.items() if key != "model"}
    lines = [{"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert file.id in {other.id for other in client.files.list()}
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    end_s = time.monotonic() + 120
    while batch.status in ("validating", "in_progress", "finalizing") and time.monotonic() < end_s:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3), batch
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {result["custom_id"] for result in results} == {"q0", "q1", "q2"}
    texts = {result["response"]["body"]["choices"][0]["message"]["content"] for result in results}
    assert texts == {ANSWER}
    assert batch.id in {other.id for other in client.batches.list()}
    assert client.files.delete(file.id).deleted


@check
def errors():
    """errors are the package's classes: 400, 401, 404"""
    error = raises(openai.BadRequestError, client.chat.completions.create, **GREEDY | {"temperature": -1})
    assert error.param == "temperature"
    unknown = raises(openai.BadRequestError, client.chat.completions.create, **GREEDY, extra_body={"prioritie": 1})
    assert "'priority'" in unknown.message
    long = GREEDY | {"messages": [{"role": "user", "content": "one two " * 5000}]}
    error = raises(openai.BadRequestError, client.chat.completions.create, **long)
    assert error.code == "context_length_exceeded"
    raises(openai.NotFoundError, client.chat.completions.create, **GREEDY | {"model": "other"})
    stranger = client.with_options(api_key="wrong")
    raises(openai.AuthenticationError, stranger.chat.completions.create, **GREEDY)


if __name__ == "__main__":
    checks.main("openai")
