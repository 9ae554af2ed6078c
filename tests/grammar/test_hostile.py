"""Specifications that are made to be expensive are refused, or cost other requests nothing."""

import contextlib
import json
import time

import pytest

from graftlm import Engine, FinishReason, SamplingParams
from graftlm.errors import GrammarError

FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def record(num_fields, **more):
    return {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(num_fields)}} | more


REQUIRE_EACH_OTHER = {
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
    },
    "$ref": "#/$defs/a",
}
REFUSED = {
    "deep nesting": ({"json_schema": nested(200)}, "nested more than 48 levels deep"),
    "a hundred thousand brackets": ({"json_schema": "[" * 100_000}, "nested more than 48 levels deep"),
    "counts of counts": ({"regex": "(a{1,500}){1,500}"}, "more than 1000 counted repetitions"),
    "three times a hundred": ({"regex": "((a{1,100}){1,100}){1,100}"}, "more than 1000 counted repetitions"),
    "five thousand groups": ({"regex": "(" * 5000 + "a" + ")" * 5000}, "groups deep"),
    "five megabytes of schema": ({"json_schema": {"enum": ["x" * 5_000_000]}}, "characters, expected at most"),
    "half a million choices": ({"choice": [str(i) for i in range(500_000)]}, "characters, expected at most"),
    "a schema that is itself": ({"json_schema": {"$ref": "#"}}, "no finite value"),
    "schemas that require each other": ({"json_schema": REQUIRE_EACH_OTHER}, "no finite value"),
    "a list of lists without end": (
        {"json_schema": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
        "no finite",
    ),
    "a rule without end": ({"ebnf": 'root ::= "a" root'}, "rule root: no finite text matches it"),
    "a rule that is itself": ({"ebnf": "root ::= root"}, "rule root: no finite text matches it"),
    "doubled forty times": (
        {"ebnf": "\n".join(["root ::= a0", *[f"a{i} ::= a{i + 1} a{i + 1}" for i in range(40)], 'a40 ::= "a"'])},
        "its shortest text has more than 16384 characters",
    ),
    "counts across rules": (
        {"ebnf": 'root ::= a{1000}\na ::= b{1000}\nb ::= "a"{1000}'},
        "its shortest text has more than 16384 characters",
    ),
    "lists of long lists": (
        {
            "json_schema": {
                "type": "array",
                "minItems": 1000,
                "items": {"type": "array", "minItems": 1000, "items": True},
            }
        },
        "its shortest text has more than 16384 characters",
    ),
    "a number beyond all": ({"json_schema": '{"const": 1e400}'}, "the number 1e400 is too large"),
    "counted rules": ({"ebnf": 'root ::= "a"{100000}'}, "more than 1000 repetitions"),
}
TAKEN = {
    "an endless rule that nothing refers to": {"ebnf": 'root ::= "a"\nr1 ::= (r1){2}'},
    "a large record": {"json_schema": record(600)},
    "a large record, all required": {"json_schema": record(600, required=[f"field_{i}" for i in range(600)])},
    "ten thousand values": {"json_schema": {"enum": [f"value {i}" for i in range(10_000)]}},
    "a recursive schema with an end": {"json_schema": {"type": "array", "items": {"$ref": "#"}}},
    "left recursion": {"ebnf": 'root ::= root "a" | "b"'},
    "many ways to nothing": {"ebnf": 'root ::= a a a "b"\na ::= "" | a a | "c"'},
}


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", grammar={"timeout_s": 10.0}, debug=True) as engine:
        engine.generate("x", SamplingParams(regex="ab"))
        yield engine


@pytest.mark.parametrize("name", REFUSED)
def test_an_expensive_specification_is_refused_at_once(engine, name):
    params, said = REFUSED[name]
    start_s = time.thread_time()
    with pytest.raises(GrammarError, match=said):
        engine.generate("x", SamplingParams(**params))
    assert time.thread_time() - start_s < 2.0


@pytest.mark.parametrize("backend", ["llguidance", "outlines", "xgrammar"])
@pytest.mark.parametrize(
    "params",
    [
        {"regex": "[" + "".join(chr(0x4E00 + 2 * i) for i in range(7000)) + "]"},
        {"json_schema": {"oneOf": [{"const": i} for i in range(2500)]}},
        {"json_schema": {"oneOf": [{"type": "array", "maxItems": i} for i in range(1, 500)]}},
    ],
    ids=["a class of thousands", "thousands of values", "hundreds of branches"],
)
def test_a_large_specification_is_checked_in_time(engine, backend, params):
    start_s = time.thread_time()
    with contextlib.suppress(GrammarError):
        engine.generate("x", SamplingParams(max_tokens=1, grammar_backend=backend, **params))
    assert time.thread_time() - start_s < 1.5


DOUBLED = "\n".join(["root ::= a0", *[f"a{i} ::= a{i + 1} a{i + 1}" for i in range(25)], 'a25 ::= "a"?'])


@pytest.mark.few(params=2)
@pytest.mark.parametrize(
    "params",
    [
        {"regex": "(a?){1000}a{1000}"},
        {"ebnf": DOUBLED},
        {"regex": "(a?b?c?d?a?){200}" * 4},
        {"regex": "(" * 40 + "a" + "*)" * 40},
    ],
)
def test_a_grammar_that_is_slow_at_each_token_is_refused(engine, params):
    (output,) = engine.generate("x", SamplingParams(**params))
    assert output.finish_reason is FinishReason.ERROR
    assert "finding the next token takes" in output.completions[0].error
    assert "ms in xgrammar, which would delay other requests; use llguidance, " in output.completions[0].error


@pytest.mark.parametrize("params", [{"regex": "(a?b?c?d?a?){200}" * 4}, {"ebnf": 'root ::= ([é]?){0,200} "x"'}])
def test_the_backend_named_in_the_refusal_accepts_the_specification(engine, params):
    (output,) = engine.generate("x", SamplingParams(max_tokens=4, grammar_backend="llguidance", **params))
    assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.completions[0].error


@pytest.mark.parametrize("name", TAKEN)
def test_other_requests_continue_beside_a_hostile_specification(engine, name):
    alone = engine.generate(["Hello", "World"], FREE)
    prompts = ["Hello", "x", "World", "y"]
    hostile = SamplingParams(temperature=1.0, seed=1, max_tokens=24, **TAKEN[name])
    together = engine.generate(prompts, [FREE, hostile, FREE, hostile])
    assert [output.token_ids for output in together[::2]] == [output.token_ids for output in alone]
    for output in together[1::2]:
        assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.completions[0].error


def test_a_recursive_schema_with_an_end_generates_json(engine):
    tree = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    }
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, json_schema=tree, n=4)
    for completion in engine.generate("x", params)[0].completions:
        if completion.finish_reason is FinishReason.STOP:
            assert isinstance(json.loads(completion.text), dict)
