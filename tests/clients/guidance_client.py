"""Guidance: SglangModel, with text, regular expressions, JSON and several turns."""

import json
import re

import checks
from checks import QUESTION, WEATHER, check, matches_weather
from guidance import assistant, gen, user
from guidance import json as gen_json
from guidance.models.experimental import SglangModel


def model():
    return SglangModel("demo", base_url=f"{checks.URL}/v1", api_key=checks.KEY, echo=False)


def ask(question=QUESTION, lm=None):
    lm = lm or model()
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


if __name__ == "__main__":
    checks.main("guidance")
