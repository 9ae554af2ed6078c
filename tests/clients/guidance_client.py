"""Guidance: SglangModel and VLLMModel, with text, regular expressions, JSON, grammars and several turns."""

import json
import re

import checks
from checks import ANSWER, QUESTION, WEATHER, check, matches_weather
from guidance import assistant, gen, select, user
from guidance import json as gen_json
from guidance.models.experimental import SglangModel, VLLMModel


def model(kind=SglangModel):
    return kind("demo", base_url=f"{checks.URL}/v1", api_key=checks.KEY, echo=False)


def ask(question=QUESTION, lm=None, kind=SglangModel):
    lm = lm or model(kind)
    with user():
        lm += question
    return lm


@check
def text():
    """gen: the text of an answer"""
    lm = ask()
    with assistant():
        lm += gen("answer", max_tokens=40)
    assert lm["answer"]


@check
def turns():
    """a second turn after the answer"""
    lm = ask()
    with assistant():
        lm += gen("first", max_tokens=20)
    lm = ask("Which day comes after Thursday?", lm)
    with assistant():
        lm += gen("second", max_tokens=20)
    assert lm["first"]
    assert lm["second"]


@check
def regex():
    """gen with a regular expression"""
    lm = ask()
    with assistant():
        lm += gen("year", regex="[0-9]{4}", max_tokens=20)
    assert re.fullmatch("[0-9]{4}", lm["year"])


@check
def schema():
    """json with a schema"""
    lm = ask()
    with assistant():
        lm += gen_json("weather", schema=WEATHER, max_tokens=60)
    assert matches_weather(json.loads(lm["weather"]))


@check
def vllm_grammar():
    """VLLMModel: text, and a grammar of text, a regular expression and a choice"""
    lm = ask(kind=VLLMModel)
    with assistant():
        lm += gen("answer", max_tokens=40)
    assert lm["answer"] == ANSWER
    lm = ask(kind=VLLMModel)
    with assistant():
        lm += "The year " + gen("year", regex="[0-9]{4}") + " was " + select(["good", "bad"], name="kind")
    assert re.fullmatch("[0-9]{4}", lm["year"])
    assert lm["kind"] in ("good", "bad")


@check
def vllm_schema():
    """VLLMModel: json with a schema"""
    lm = ask(kind=VLLMModel)
    with assistant():
        lm += gen_json("weather", schema=WEATHER, max_tokens=60)
    assert matches_weather(json.loads(lm["weather"]))


if __name__ == "__main__":
    checks.main("guidance")
