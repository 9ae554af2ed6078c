"""Output types: those of Outlines and of Python become schemas, regular expressions and grammars."""

import dataclasses
import enum
import importlib
import json
import re
import sys
from collections.abc import Callable
from typing import Literal, Optional

import genson
import outlines
import pydantic
import pytest
from outlines.inputs import Chat
from outlines.types import CFG, Choice, JsonSchema, Regex, exactly, integer, isbn
from typing_extensions import TypedDict

from graftlm import Engine, SamplingParams, gen
from graftlm.errors import GrammarError, InvalidPromptError, ProgramError, SamplingParamsError
from graftlm.lang import EngineBackend, function
from graftlm.outlines import from_engine

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "What is 12 plus 30?"}]


@dataclasses.dataclass
class Data:
    ok: bool


class Typed(TypedDict):
    ok: bool


class Model(pydantic.BaseModel):
    ok: bool


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


def call(ok: bool) -> None:
    """A function whose signature is a schema."""


def specification(value, name="regex"):
    params = SamplingParams(**{name: value})
    return params.grammar_field, getattr(params, params.grammar_field)


@pytest.mark.parametrize("name", ["regex", "json_schema", "ebnf", "choice"])
@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (Regex("[a-c]+"), ["abc"], ["", "d"]),
        ("day " + Regex("[1-9]"), ["day 1"], ["day", "day 0"]),
        (Regex("a") | "b.c", ["a", "b.c"], ["bxc"]),
        (exactly(2, Regex("[01]")), ["01"], ["1", "012"]),
        (integer, ["-12", "0"], ["01", "a"]),
        (Choice(["red", 2]), ["red", "2"], ["3"]),
        (Literal["red", "blue"], ["red", "blue"], ["re"]),
        (Color, ["red", "blue"], ["RED"]),
        (Optional[int], ["1", "None"], ["x"]),  # noqa: UP045  # the form that users of Outlines write
        (int | bool, ["12", "True"], ["x"]),
        (list[int], ["[1]", "[1, 2]"], ["[]", "1"]),
        (float, ["1.5"], ["x"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_type_becomes_a_regular_expression_in_any_field(name, value, good, bad):
    field, regex = specification(value, name)
    assert field == "regex"
    assert all(re.fullmatch(regex, text) for text in good)
    assert not any(re.fullmatch(regex, text) for text in bad)


@pytest.mark.parametrize("name", ["regex", "json_schema"])
@pytest.mark.parametrize(
    "value", [JsonSchema(SCHEMA), JsonSchema(Model), Data, Typed, Model, call], ids=lambda value: type(value).__name__
)
def test_a_type_becomes_a_json_schema(name, value):
    field, schema = specification(value, name)
    schema = json.loads(schema) if isinstance(schema, str) else schema
    assert field == "json_schema"
    assert list(schema["properties"]) == ["ok"]
    assert schema["required"] == ["ok"]


def test_other_kinds_of_types():
    builder = genson.SchemaBuilder()
    builder.add_object({"ok": True})
    assert json.loads(specification(builder)[1])["required"] == ["ok"]
    assert specification(CFG('start: "a"')) == ("ebnf", 'start: "a"')
    field, regex = specification(JsonSchema(SCHEMA, whitespace_pattern=""))
    assert field == "regex"
    assert re.fullmatch(regex, '{"ok":true}')
    assert not re.fullmatch(regex, '{"ok": true}')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"regex": object}, "regex: Outlines cannot convert <class 'object'>"),
        ({"json_schema": lambda x: x}, "json_schema: Outlines cannot convert"),
        (
            {"regex": Model, "json_schema": SCHEMA},
            "regex: the type is a specification for json_schema, which is also given",
        ),
        ({"regex": 3}, "regex must be a string"),
        ({"json_schema": ["a"]}, "json_schema must be a dict"),
        ({"regex": "a", "json_schema": SCHEMA}, "at most one of"),
    ],
)
def test_other_values_are_refused(arguments, message):
    with pytest.raises(SamplingParamsError, match=re.escape(message)):
        SamplingParams(**arguments)


def test_other_values_are_refused_by_the_language(engine):
    for arguments in ({"regex": object}, {"regex": Model, "json_schema": SCHEMA}, {"json_schema": ["a"]}):
        with pytest.raises(SamplingParamsError):
            gen("x", **arguments)

    @function
    def program(s):
        s += "Text: " + gen("x", regex="a", json_schema=SCHEMA)

    with pytest.raises(ProgramError, match="at most one of"):
        program.run(backend=EngineBackend(engine))["x"]


def test_without_outlines_only_pydantic_classes_are_converted(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines.types.dsl", None)
    assert specification(Model)[0] == "json_schema"
    with pytest.raises(SamplingParamsError, match=r"need Outlines: pip install 'graftlm\[outlines\]'"):
        SamplingParams(regex=Literal["a"])


def test_the_model_of_outlines_names_the_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines.inputs", None)
    monkeypatch.delitem(sys.modules, "graftlm.outlines")
    with pytest.raises(ImportError, match=r"graftlm.outlines needs Outlines: pip install 'graftlm\[outlines\]'"):
        importlib.import_module("graftlm.outlines")


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo") as engine:
        yield engine


def test_the_output_of_an_engine_has_the_type(engine):
    for value, pattern in ((Literal["41", "42"], "42"), ("It is " + Regex("[0-9]{2}"), "It is [0-9]{2}")):
        (output,) = engine.generate([CHAT], SamplingParams(regex=value, temperature=0))
        assert re.fullmatch(pattern, output.text)
    with pytest.raises(GrammarError, match="lookarounds"):
        engine.generate([CHAT], SamplingParams(regex=isbn))


def test_the_language_accepts_types(engine):
    @function
    def program(s):
        s += "Numbers: " + gen("digits", regex=exactly(3, Regex("[0-9]"))) + ", "
        s += gen("object", json_schema=Data, max_tokens=30) + gen("grammar", ebnf='root ::= "x" | "y"')
        s += gen("lark", regex=CFG('start: "ab" | "cd"'))

    state = program.run(backend=EngineBackend(engine), temperature=0)
    assert re.fullmatch("[0-9]{3}", state["digits"])
    assert isinstance(json.loads(state["object"])["ok"], bool)
    assert state["grammar"] in ("x", "y")
    assert state["lark"] in ("ab", "cd")


def test_outlines_generates_with_an_engine(engine):
    model = from_engine(engine)
    question, greedy = CHAT[0]["content"], {"temperature": 0}
    (expected,) = engine.generate([CHAT], SamplingParams(**greedy))
    assert model(question, **greedy) == model(Chat(CHAT), **greedy) == expected.text
    assert "".join(model.stream(question, **greedy)) == expected.text
    assert model(question, Literal["41", "42"], **greedy) == "42"
    assert outlines.Generator(model, Literal["41", "42"]).batch([question, question], **greedy) == ["42", "42"]
    assert "".join(model.stream(question, Literal["41", "42"], **greedy)) == "42"
    assert len(model(question, n=3, max_tokens=4, seed=1)) == 3
    assert model(question, CFG('start: "yes" | "no"'), **greedy) in ("yes", "no")
    Data(**json.loads(model(question, Data, **greedy)))


def test_errors_of_the_outlines_model(engine):
    model = from_engine(engine)
    with pytest.raises(InvalidPromptError, match="expected a text or a Chat whose messages are texts"):
        model(Chat([{"role": "user", "content": ["an image"]}]))
    with pytest.raises(InvalidPromptError, match="expected a text or a Chat"):
        model(3)
    with pytest.raises(SamplingParamsError, match="n: a stream has one completion, got 2"):
        list(model.stream("a", n=2))
    with pytest.raises(SamplingParamsError, match="output_type: Outlines cannot convert"):
        model("a", object)
    with pytest.raises(TypeError, match="max_new_tokens"):
        model("a", max_new_tokens=3)


class CallablePerson(pydantic.BaseModel):
    call: Callable[[int], int]


@dataclasses.dataclass
class PersonOfUnknownType:
    home: "Unknown"  # noqa: F821


@pytest.mark.parametrize(
    ("output_type", "says"),
    [(CallablePerson, "CallablePerson'> has no JSON schema"), (PersonOfUnknownType, "Outlines cannot convert")],
)
def test_a_type_that_pydantic_cannot_convert_is_an_error_of_the_parameters(output_type, says):
    with pytest.raises(SamplingParamsError, match=f"json_schema: .*{says}"):
        SamplingParams(json_schema=output_type)
