"""Instructor: objects over chats by tools and JSON schemas, over responses and over messages."""

from typing import Literal

import checks
import instructor
from anthropic import Anthropic
from checks import QUESTION, check
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

SERVER = {"base_url": f"{checks.URL}/v1", "api_key": checks.KEY, "max_retries": 0}
ASK = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_retries": 0}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def client_of(mode):
    return instructor.from_openai(OpenAI(**SERVER), mode=mode)


@check
def modes():
    """an object by tools and by a JSON schema"""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        answer = client_of(mode).create(**ASK, max_tokens=100, response_model=Weather)
        assert isinstance(answer, Weather), mode


@check
def usage():
    """create_with_completion: the object with the answer and its usage"""
    answer, completion = client_of(instructor.Mode.TOOLS).create_with_completion(
        **ASK, max_tokens=100, response_model=Weather
    )
    assert isinstance(answer, Weather)
    assert completion.usage.completion_tokens > 0


@check
async def asynchronous():
    """the asynchronous client"""
    client = instructor.from_openai(AsyncOpenAI(**SERVER), mode=instructor.Mode.TOOLS)
    assert isinstance(await client.create(**ASK, max_tokens=100, response_model=Weather), Weather)


@check
def partial():
    """create_partial streams an object that grows"""
    parts = list(client_of(instructor.Mode.JSON_SCHEMA).create_partial(**ASK, max_tokens=100, response_model=Weather))
    assert len(parts) > 1
    Weather.model_validate(parts[-1].model_dump())


@check
def plain():
    """without a class: the answer as it is"""
    answer = client_of(instructor.Mode.TOOLS).create(**ASK, max_tokens=60, response_model=None)
    assert answer.choices[0].message.content == checks.ANSWER


@check
def anthropic():
    """an object over /v1/messages"""
    client = instructor.from_anthropic(Anthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0))
    fields = {key: value for key, value in ASK.items() if key != "temperature"}
    assert isinstance(client.create(**fields, max_tokens=100, response_model=Weather), Weather)


if __name__ == "__main__":
    checks.main("instructor")
