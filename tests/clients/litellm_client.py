"""LiteLLM: providers hosted_vllm, openai and anthropic, the bridges of Responses and Messages, error classes."""

import json
from typing import Literal

import checks
import litellm
import litellm_backend  # noqa: F401 -- registers its checks
from checks import ANSWER, QUESTION, WEATHER, check, matches_weather, raises
from pydantic import BaseModel

litellm.telemetry = False
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
#: Provider -> URL of the server for it.
PROVIDERS = {"hosted_vllm": f"{checks.URL}/v1", "openai": f"{checks.URL}/v1", "anthropic": checks.URL}
CHATS = ("hosted_vllm", "openai")


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def where(provider):
    return {"model": f"{provider}/demo", "api_base": PROVIDERS[provider], "api_key": checks.KEY, "num_retries": 0}


def greedy(provider):
    return where(provider) | {"messages": MESSAGES, "temperature": 0, "max_tokens": 60}


@check
def chat():
    """a chat by hosted_vllm, openai and anthropic: text and usage"""
    for provider in PROVIDERS:
        answer = litellm.completion(**greedy(provider))
        assert answer.choices[0].message.content == ANSWER, provider
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def stream():
    """a streamed chat by hosted_vllm, openai and anthropic, rebuilt from its chunks"""
    for provider in PROVIDERS:
        options = {"stream_options": {"include_usage": True}}
        chunks = list(litellm.completion(**greedy(provider), stream=True, **options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER, provider
        whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert whole.choices[0].message.content == ANSWER
        assert whole.usage.completion_tokens == litellm.completion(**greedy(provider)).usage.completion_tokens


@check
async def asynchronous():
    """acompletion, whole and streamed"""
    for provider in CHATS:
        assert (await litellm.acompletion(**greedy(provider))).choices[0].message.content == ANSWER
        chunks = [chunk async for chunk in await litellm.acompletion(**greedy(provider), stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


@check
def structured():
    """response_format: a pydantic class, and a JSON schema"""
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    for provider in CHATS:
        answer = litellm.completion(**greedy(provider), response_format=Weather)
        Weather.model_validate_json(answer.choices[0].message.content)
        answer = litellm.completion(**greedy(provider), response_format=schema)
        assert matches_weather(json.loads(answer.choices[0].message.content))


@check
def tools():
    """a required call and the answer to its result, by hosted_vllm, openai and anthropic"""
    for provider in PROVIDERS:
        fields = greedy(provider) | {"tools": [TOOL]}
        named = {"type": "function", "function": {"name": "weather"}}
        message = litellm.completion(**fields, tool_choice=named).choices[0].message
        call = message.tool_calls[0]
        assert matches_weather(json.loads(call.function.arguments)), provider
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
        answer = litellm.completion(**fields | {"messages": [*MESSAGES, message.model_dump(), *results]})
        assert answer.choices[0].message.content


@check
def responses():
    """litellm.responses, whole and streamed: openai by /v1/responses, hosted_vllm as LiteLLM sends it"""
    for provider in CHATS:
        fields = where(provider) | {"input": QUESTION, "temperature": 0, "max_output_tokens": 60}
        whole = litellm.responses(**fields)
        text = "".join(part.text for item in whole.output if item.type == "message" for part in item.content)
        assert text == ANSWER, provider
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        events = list(litellm.responses(**fields, stream=True))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == ANSWER, provider
        assert events[-1].type == "response.completed"


@check
async def messages():
    """litellm.anthropic.messages over a chat (hosted_vllm), whole and streamed, and over /v1/messages (anthropic)"""
    for provider in ("hosted_vllm", "anthropic"):
        fields = where(provider) | {"messages": MESSAGES, "temperature": 0, "max_tokens": 60}
        del fields["num_retries"]
        whole = await litellm.anthropic.messages.acreate(**fields)
        assert whole["content"][0]["text"] == ANSWER, provider
        if provider == "anthropic":  # streaming by this way imports all requirements of LiteLLM's proxy
            continue
        raw = b""
        async for chunk in await litellm.anthropic.messages.acreate(**fields, stream=True):
            raw += chunk if isinstance(chunk, bytes) else f"data: {json.dumps(chunk)}\n".encode()
        events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
        texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
        assert "".join(texts) == ANSWER, provider


@check
def embeddings():
    """embeddings by hosted_vllm and openai"""
    for provider in CHATS:
        answer = litellm.embedding(**where(provider), input=["a fox", "a dog"])
        assert len(answer.data) == 2
        assert len(answer.data[0]["embedding"]) == len(answer.data[1]["embedding"]) > 1


@check
def text_completion():
    """text_completion, whole and streamed"""
    fields = where("hosted_vllm") | {"prompt": "One, two,", "temperature": 0, "max_tokens": 8}
    whole = litellm.text_completion(**fields).choices[0].text
    streamed = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**fields, stream=True))
    assert whole == streamed != ""


@check
def errors():
    """errors are LiteLLM's classes: context window, bad request, not found, authentication"""
    for provider in PROVIDERS:
        fields = greedy(provider)
        long = fields | {"messages": [{"role": "user", "content": "one two " * 5000}]}
        raises(litellm.ContextWindowExceededError, litellm.completion, **long)
        raises(litellm.NotFoundError, litellm.completion, **fields | {"model": f"{provider}/other"})
        raises(litellm.AuthenticationError, litellm.completion, **fields | {"api_key": "wrong"})
        raises(litellm.BadRequestError, litellm.completion, **fields | {"top_p": 7})


if __name__ == "__main__":
    checks.main("litellm")
