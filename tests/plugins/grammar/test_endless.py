"""Rules and schemas without a finite text are refused by rule or path; those with a base are accepted."""

import json

import pytest

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.errors import GrammarError
from graftlm_grammar.ebnf import read_ebnf
from graftlm_grammar.endless import endless_rules


@pytest.mark.parametrize(
    ("ebnf", "endless"),
    [
        ('root ::= "x" root', ("root",)),
        ("root ::= root", ("root",)),
        ('root ::= root "x" | root "y"', ("root",)),
        ('root ::= "x" a\na ::= b | "y" b\nb ::= "z" a', ("root", "a", "b")),
        ('root ::= "x" | a\na ::= a a', ("a",)),
        ('root ::= "x" (a | "y")\na ::= "z" a', ("a",)),
        ('root ::= a{0,2}\na ::= "z" a', ("a",)),
        ('root ::= "x" root+', ("root",)),
        ('root ::= "x" root{2}', ("root",)),
    ],
)
def test_rules_without_a_finite_text_are_found(ebnf, endless):
    assert sorted(endless_rules(read_ebnf(ebnf))) == sorted(endless)


@pytest.mark.parametrize(
    "ebnf",
    [
        'root ::= "x"',
        'root ::= ""',
        'root ::= "x" root | "y"',
        'root ::= root "x" | "y"',
        'root ::= "x" root?',
        'root ::= "x" root*',
        'root ::= "x" root{0,3}',
        'root ::= a b\na ::= "x" b | "y"\nb ::= a | "z" b',
        'root ::= "x"\nunused ::= "y" unused',
    ],
)
def test_rules_with_a_base_are_accepted(ebnf, byte_backend):
    assert endless_rules(read_ebnf(ebnf)) == ()
    byte_backend.check(GrammarSpec(GrammarKind.EBNF, ebnf))


@pytest.mark.parametrize(
    ("ebnf", "rule"), [('root ::= "x" root', "root"), ('root ::= "x" | tail\ntail ::= "y" tail', "tail")]
)
def test_a_grammar_without_a_finite_text_is_refused_by_its_rule(byte_backend, ebnf, rule):
    for method in (byte_backend.check, byte_backend.compile):
        with pytest.raises(GrammarError, match=rf"^ebnf: rule {rule}: no finite text matches it"):
            method(GrammarSpec(GrammarKind.EBNF, ebnf))


def node(**more):
    """Return the schema of an object that may contain another object of its kind."""
    return {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, **more}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#/$defs/node", "$defs": {"node": node(required=["next"])}}, r"\$"),
        (
            {"properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": node(required=["next"])}},
            r"\$\.(\$defs\.node|properties\.a)",
        ),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, r"\$"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, r"\$"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, r"\$"),
        (
            {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}], "$defs": {"node": node(required=["next"])}},
            r"\$\.(\$defs\.node|anyOf\[1\])",
        ),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_that_requires_itself_is_refused_by_its_path(byte_backend, schema, path, strict):
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict)
    for method in (byte_backend.check, byte_backend.compile):
        with pytest.raises(GrammarError, match=rf"^json_schema: {path}.*: no finite value is valid"):
            method(spec)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#/$defs/node", "$defs": {"node": node()}}, '{"next": {"next": {}}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "minItems": 1}, "[[null]]"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]}, '{"a": {"a": null}}'),
    ],
)
def test_a_recursive_schema_with_a_base_is_enforced(texts, schema, text):
    assert texts.accepted_by_schema(schema, [text]) == [text]
