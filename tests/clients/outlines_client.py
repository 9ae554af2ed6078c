"""Outlines: from_vllm, from_sglang and from_openai, with every kind of output type, streams and batches."""

import json
import re
from typing import Literal

import checks
import outlines
from checks import ANSWER, QUESTION, WEATHER, check, matches_weather, raises
from openai import AsyncOpenAI, OpenAI
from outlines.types import CFG, JsonSchema, Regex, integer
from pydantic import BaseModel

SERVER = {"base_url": f"{checks.URL}/v1", "api_key": checks.KEY, "max_retries": 0}
GREEDY = {"temperature": 0, "max_tokens": 60}
LARK = 'start: "yes" | "no"'
EBNF = 'root ::= "yes" | "no"'


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def models():
    return [from_(OpenAI(**SERVER), "demo") for from_ in (outlines.from_vllm, outlines.from_sglang)]


@check
def text():
    """a text, whole and streamed: vLLM and SGLang"""
    for model in models():
        assert model(QUESTION, **GREEDY) == "".join(model.stream(QUESTION, **GREEDY)) == ANSWER


@check
def types():
    """pydantic classes, JSON schemas, literals, regular expressions and terms: vLLM and SGLang"""
    for model in models():
        Weather.model_validate_json(model(QUESTION, Weather, **GREEDY))
        assert matches_weather(json.loads(model(QUESTION, JsonSchema(WEATHER), **GREEDY)))
        assert model(QUESTION, Literal["red", "blue"], **GREEDY) in ("red", "blue")
        assert re.fullmatch("[0-9]{4}", model(QUESTION, Regex("[0-9]{4}"), **GREEDY))
        assert re.fullmatch(r"day \d+", model(QUESTION, "day " + Regex("[1-9][0-9]?"), **GREEDY))
        assert isinstance(int(model(QUESTION, integer, **GREEDY)), int)


@check
def stream():
    """a streamed object: vLLM and SGLang"""
    for model in models():
        Weather.model_validate_json("".join(model.stream(QUESTION, Weather, **GREEDY)))


@check
def grammar():
    """grammars: EBNF and Lark by vLLM and SGLang"""
    for model in models():
        for text in (EBNF, LARK):
            assert model(QUESTION, CFG(text), **GREEDY) in ("yes", "no")


@check
def malformed_grammar():
    """grammars: the error of a malformed Lark grammar names the line"""
    error = raises(outlines.exceptions.BadRequestError, models()[0], QUESTION, CFG('start: "yes'), **GREEDY)
    assert "line 1" in str(error)


@check
async def asynchronous():
    """the asynchronous client"""
    for from_ in (outlines.from_vllm, outlines.from_sglang):
        model = from_(AsyncOpenAI(**SERVER), "demo")
        assert await model(QUESTION, **GREEDY) == ANSWER
        assert await model(QUESTION, Literal["red", "blue"], **GREEDY) in ("red", "blue")


@check
def generator():
    """a Generator, called twice"""
    generator = outlines.Generator(models()[0], Weather)
    for _ in range(2):
        Weather.model_validate_json(generator(QUESTION, **GREEDY))


@check
def openai():
    """from_openai with a JSON schema"""
    Weather.model_validate_json(outlines.from_openai(OpenAI(**SERVER), "demo")(QUESTION, Weather, **GREEDY))


if __name__ == "__main__":
    checks.main("outlines")
