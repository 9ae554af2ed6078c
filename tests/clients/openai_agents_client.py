"""OpenAI's Agents SDK: agents over responses and chats, with tools, output types, streams, sessions and handoffs."""

from typing import Literal

import checks
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from checks import ANSWER, QUESTION, check
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
GREEDY = ModelSettings(temperature=0, max_tokens=100)


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def models():
    client = AsyncOpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0)
    return [kind("demo", openai_client=client) for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)]


@check
async def text():
    """an answer and its usage: responses and chats"""
    for model in models():
        result = await Runner.run(Agent("Adder", model=model, model_settings=GREEDY), QUESTION)
        assert result.final_output == ANSWER, model
        usage = result.context_wrapper.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


@check
async def stream():
    """a streamed answer: responses and chats"""
    for model in models():
        result = Runner.run_streamed(Agent("Adder", model=model, model_settings=GREEDY), QUESTION)
        raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        assert "".join(event.delta for event in raw if event.type == "response.output_text.delta") == ANSWER
        assert result.final_output == ANSWER


@check
async def output_type():
    """an output type: responses and chats"""
    for model in models():
        agent = Agent("Weather", model=model, model_settings=GREEDY, output_type=Weather)
        assert isinstance((await Runner.run(agent, QUESTION)).final_output, Weather), model


@check
async def tools():
    """a required tool is called, and its result answered: responses and chats"""
    cities = []

    @function_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Tell the weather."""
        cities.append(city)
        return "rain"

    settings = ModelSettings(temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False)
    for model in models():
        cities.clear()
        agent = Agent("Weather", model=model, model_settings=settings, tools=[weather])
        result = await Runner.run(agent, QUESTION)
        assert cities[0] in ("Oslo", "Rome"), model
        assert result.final_output


@check
async def session():
    """a second turn of a session has the first one in its input: responses and chats"""
    for model in models():
        agent = Agent("Adder", model=model, model_settings=GREEDY)
        session = SQLiteSession(type(model).__name__)
        first = await Runner.run(agent, QUESTION, session=session)
        second = await Runner.run(agent, QUESTION, session=session)
        assert second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens
        assert len(await session.get_items()) == 4


@check
async def previous():
    """a second turn by previous_response_id"""
    agent = Agent("Adder", model=models()[0], model_settings=GREEDY)
    first = await Runner.run(agent, QUESTION)
    second = await Runner.run(agent, QUESTION, previous_response_id=first.last_response_id)
    assert second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens


@check
async def handoff():
    """an agent hands over to another one: responses and chats"""
    for model in models():
        other = Agent("Adder", model=model, model_settings=GREEDY)
        settings = ModelSettings(temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False)
        first = Agent("First", model=model, model_settings=settings, handoffs=[other])
        result = await Runner.run(first, QUESTION)
        assert result.last_agent.name == "Adder", model
        assert result.final_output


if __name__ == "__main__":
    checks.main("openai-agents")
