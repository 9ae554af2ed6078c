"""Pydantic AI: agents over chats, responses and messages, with tools and structured output."""

from typing import Literal

import checks
from anthropic import AsyncAnthropic
from checks import ANSWER, QUESTION, check
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

GREEDY = ModelSettings(temperature=0, max_tokens=80)


def provider(key=checks.KEY):
    return OpenAIProvider(base_url=f"{checks.URL}/v1", api_key=key)


def models():
    client = AsyncAnthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0)
    return [
        OpenAIChatModel("demo", provider=provider()),
        OpenAIResponsesModel("demo", provider=provider()),
        AnthropicModel("demo", provider=AnthropicProvider(anthropic_client=client)),
    ]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


@check
async def text():
    """an answer and its usage: chats, responses, messages"""
    for model in models():
        result = await Agent(model, model_settings=GREEDY).run(QUESTION)
        assert result.output == ANSWER, model
        usage = result.usage() if callable(result.usage) else result.usage
        assert usage.input_tokens > 0
        assert usage.output_tokens > 0


@check
async def stream():
    """a streamed answer: chats, responses, messages"""
    for model in models():
        async with Agent(model, model_settings=GREEDY).run_stream(QUESTION) as result:
            assert "".join([part async for part in result.stream_text(delta=True)]) == ANSWER, model


@check
async def history():
    """a second turn with the history of the first"""
    for model in models():
        agent = Agent(model, model_settings=GREEDY, instructions="Answer in one sentence.")
        first = await agent.run(QUESTION)
        second = await agent.run(QUESTION, message_history=first.all_messages())
        assert second.output
        assert len(second.all_messages()) == 4


@check
async def structured():
    """structured output by a tool: chats, responses, messages"""
    for model in models():
        result = await Agent(model, output_type=ToolOutput(Weather), model_settings=GREEDY).run(QUESTION)
        assert isinstance(result.output, Weather), model


@check
async def native():
    """structured output by a JSON schema (NativeOutput): chats and responses"""
    for model in models()[:2]:
        result = await Agent(model, output_type=NativeOutput(Weather), model_settings=GREEDY).run(QUESTION)
        assert isinstance(result.output, Weather), model


@check
async def tools():
    """a tool is called and the agent ends with an object: chats, responses, messages"""
    cities = []

    def look_up(city: Literal["Oslo", "Rome"]) -> str:
        """Look up a city."""
        cities.append(city)
        return "rain"

    for model in models():
        agent = Agent(model, output_type=ToolOutput(Weather), tools=[look_up], model_settings=GREEDY)
        result = await agent.run(QUESTION)
        assert isinstance(result.output, Weather), model
    assert cities


@check
async def errors():
    """errors are ModelHTTPError with the status: 401, 404"""
    for key, name, status in (("wrong", "demo", 401), (checks.KEY, "other", 404)):
        agent, seen = Agent(OpenAIChatModel(name, provider=provider(key))), None
        try:
            await agent.run(QUESTION)
        except ModelHTTPError as error:
            seen = error.status_code
        assert seen == status


if __name__ == "__main__":
    checks.main("pydantic-ai-slim")
