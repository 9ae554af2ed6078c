"""The `outlines` backend keeps its contract, and its own code on top of the library is right."""

import json
import random
import re
import time

import jsonschema
import numpy as np
import pytest

import graftlm_grammar
from graftlm.contracts import API_VERSION, GrammarContext, GrammarKind, GrammarSpec, Platform
from graftlm.errors import GrammarError
from graftlm.testing import GrammarBackendConformance
from graftlm.testing.grammar import STANDARD_CASES, STANDARD_MALFORMED
from graftlm_grammar.options import OutlinesOptions
from graftlm_grammar.outlines_backend import OutlinesBackend

PROVIDER = next(one for one in graftlm_grammar.provide_grammar_backends() if one.name == "outlines")
END = 256
REFUSED = (GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG)


class TestOutlines(GrammarBackendConformance):
    cases = tuple(case for case in STANDARD_CASES if case.kind not in REFUSED)
    malformed = (*STANDARD_MALFORMED, *(case.spec for case in STANDARD_CASES if case.kind in REFUSED))

    def create(self, context: GrammarContext):
        return PROVIDER.create(PROVIDER.options(whitespace="flexible", max_whitespace=1), context)


@pytest.fixture(scope="module")
def outlines_with(texts_of, byte_context):
    """Return a function of options."""
    return lambda **options: texts_of(OutlinesBackend(OutlinesOptions(**options), byte_context))


@pytest.fixture(scope="module")
def outlines(outlines_with):
    return outlines_with()


def test_the_provider_is_available_if_the_library_is_installed():
    assert PROVIDER.api_version == API_VERSION
    assert PROVIDER.unavailable(Platform()) is None


LINKED = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("ebnf", 'root ::= "a"', "outlines does not support ebnf; use xgrammar or llguidance"),
        ("structural_tag", "{}", "outlines does not support structural_tag"),
        ("regex", "(?=a)b", "lookarounds"),
        ("regex", "(?!a)b", "lookarounds"),
        ("regex", r"(a)\1", r"escape \\1"),
        ("regex", r"\bab", r"escape \\b"),
        ("regex", r"a\u0000", r"regex: U\+0000"),
        ("regex", "x" * 70_000, "regex: got 70000 characters, expected at most"),
        ("regex", "\ud800", "regex: not text"),
        ("json_schema", json.dumps(LINKED), "json_schema: outlines does not support recursion"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', r"json_schema: \$\.uniqueItems"),
        ("choice", json.dumps(["x" * 1000 + str(i) for i in range(60)]), "choice: too large"),
    ],
)
def test_an_unsupported_specification_is_refused_by_name(outlines, kind, text, said):
    for method in (outlines.backend.check, outlines.backend.compile):
        with pytest.raises(GrammarError, match=said):
            method(GrammarSpec(GrammarKind(kind), text))


@pytest.mark.parametrize("regex", ["(a|b)*a(a|b){40}", "[^a]{0,20}[b-z]{0,20}" * 40])
def test_a_compilation_that_never_ends_is_refused_in_time(outlines_with, regex):
    texts, start = outlines_with(max_compile_s=0.5, max_index_mib=64), time.monotonic()
    with pytest.raises(GrammarError, match=r"regex: (not compiled by outlines|outlines needs more)"):
        texts.matcher("regex", regex)
    assert time.monotonic() - start < 5
    assert texts.accepted("regex", "a|ab", ["a", "ab", "b"]) == ["a", "ab"]


def test_repetitions_of_the_first_characters_are_compiled(outlines):
    """The library alone takes time that is exponential in the count."""
    texts = ["b1", "b" * 61 + "1", "b" * 62 + "1"]
    assert outlines.accepted("regex", "b[a-z]{0,60}[0-9]", texts) == texts[:2]


@pytest.mark.parametrize(
    ("regex", "texts", "accepted"),
    [
        ("a|ab|abc", ["", "a", "ab", "abc", "abcd"], ["a", "ab", "abc"]),
        ("(a|ab)??", ["", "a", "ab", "b"], ["", "a", "ab"]),
        (r"\d", ["1", "\u0661"], ["1"]),
        (r"\w", ["x", "é"], ["x"]),
        (".", ["é", "\n", "\0", "😀"], ["é", "😀"]),
        ("[é-ü]+", ["éü", "z"], ["éü"]),
        (r"[\[\]&~-]+", ["[]&~-", "a"], ["[]&~-"]),
    ],
)
def test_expressions_accept_and_reject_the_right_texts(outlines, regex, texts, accepted):
    assert outlines.accepted("regex", regex, texts) == accepted


@pytest.mark.parametrize(
    ("whitespace", "accepted"),
    [("compact", ['{"a":1}']), ("spaced", ['{"a": 1}']), ("flexible", ['{"a":1}', '{"a": 1}', '{ "a"\n:1}'])],
)
def test_whitespace_follows_the_options(outlines_with, whitespace, accepted):
    texts = outlines_with(whitespace=whitespace, max_whitespace=1)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert texts.accepted_by_schema(schema, ['{"a":1}', '{"a": 1}', '{ "a"\n:1}', '{"a":  1}']) == accepted


SCHEMAS = [
    {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(6)}, "required": ["p2"]},
    {"type": "array", "items": {"enum": ["ab", 1, None]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "integer", "minimum": -5, "maximum": 12}, {"type": "string", "pattern": "^é{2}$"}]},
    {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "number"}}, "required": ["a", "n"]},
    {},
]


def walk(matcher, draw, max_len=60):
    """Return a text of random allowed tokens; None if it gets too long."""
    mask, text = np.zeros((1, 9), dtype=np.int32), b""
    while len(text) < max_len:
        matcher.fill_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        token_id = END if END in allowed and draw.random() < 0.5 else draw.choice(allowed)
        assert matcher.accept(token_id)
        if token_id == END:
            return text.decode()
        text += bytes([token_id])
    return None


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_every_text_under_the_masks_is_valid(outlines, schema):
    compiled = outlines.backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    ended = [text for seed in range(60) if (text := walk(compiled.matcher(), random.Random(seed))) is not None]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("regex", ["(a|ab)(c|bcd)*", "[é-ü]{1,3}|x?", "[^a-y]+z"])
def test_every_text_under_the_masks_matches_the_expression(outlines, regex):
    compiled = outlines.backend.compile(GrammarSpec(GrammarKind.REGEX, regex))
    ended = [text for seed in range(60) if (text := walk(compiled.matcher(), random.Random(seed))) is not None]
    assert ended
    assert all(re.fullmatch(regex, text) for text in ended)


@pytest.mark.parametrize("additional", [False, {"type": "null"}])
def test_many_properties_may_be_optional(outlines, additional):
    values = {f"f{i}": True for i in range(20)}
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in values},
        "additionalProperties": additional,
    }
    allowed = ["{}", '{"f3":true}', '{"f0":true,"f19":false}', json.dumps(values, separators=(",", ":"))]
    others = ['{"f0":true,"x":null}', '{"x":null}']
    assert outlines.accepted_by_schema(schema, [*allowed, *others, '{"f3":true,"f2":true}', '{"f3":1}']) == [
        *allowed,
        *(others if additional else ()),
    ]


def test_unconstrained_values_nest_at_most_two_deep(outlines):
    assert outlines.accepted_by_schema({}, ['[{"a":[]}]', "[[1]]", '{"a":{"b":1}}', "[[[1]]]"]) == [
        "[[1]]",
        '{"a":{"b":1}}',
    ]


@pytest.mark.parametrize(
    ("regex", "text", "tokens"),
    [("ab(é|è)", "ab", [*b"ab", 0xC3]), ("éa?", "é", [0xC3, 0xA9]), ("a*", "", []), ("ab", "ab", [*b"ab", END])],
)
def test_text_without_alternatives_is_forced(outlines, regex, text, tokens):
    matcher = outlines.matcher("regex", regex)
    assert (matcher.forced_text(), matcher.forced_tokens()) == (text, tokens)


def test_rollbacks_may_be_longer_than_the_librarys_limit(outlines):
    matcher = outlines.matcher("regex", "a(ba)*c")
    assert all(matcher.accept(byte) for byte in b"ab" * 1500 + b"ac")
    assert matcher.accept(END)
    matcher.rollback(3001)
    assert matcher.forced_tokens() == [ord("a")]


def test_multiples_are_refused_by_their_path_and_can_be_ignored(outlines_with):
    backend = outlines_with().backend
    text = json.dumps({"type": "array", "items": {"type": "integer", "multipleOf": 3}})
    with pytest.raises(GrammarError, match=r"^json_schema: \$\.items\.multipleOf: not enforced by outlines"):
        backend.check(GrammarSpec(GrammarKind.JSON_SCHEMA, text))
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, text, strict=False)
    assert backend.check(spec) == ("$.items.multipleOf",)
    assert outlines_with().accepted_by_spec(spec, ["[3]", "[4]", "[a]"]) == ["[3]", "[4]"]


def test_errors_in_an_expression_have_the_same_message_as_in_xgrammar(outlines_with, byte_backend):
    said = []
    for backend in (outlines_with().backend, byte_backend):
        with pytest.raises(GrammarError) as caught:
            backend.check(GrammarSpec(GrammarKind.REGEX, "(a"))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert said[0].startswith("regex: ")
