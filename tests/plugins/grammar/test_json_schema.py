"""JSON schemas: every keyword is enforced or refused, and every generated text is valid."""

import json
import random
import re
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.errors import GrammarError
from graftlm_grammar.formats import FORMATS
from graftlm_grammar.json_schema import translate_schema
from graftlm_grammar.llguidance_backend import LLGuidanceBackend
from graftlm_grammar.llguidance_schema import prepare_schema
from graftlm_grammar.options import JsonOptions, LLGuidanceOptions, XGrammarOptions
from graftlm_grammar.schema_keywords import ANNOTATIONS, COMBINED, ENFORCED

TRANSLATIONS = [pytest.param(translate_schema, id="xgrammar"), pytest.param(prepare_schema, id="llguidance")]
NUMBER = {"type": "number"}
INTEGER = {"type": "integer"}
STRING = {"type": "string"}
POINT = {"type": "object", "properties": {"x": INTEGER, "y": INTEGER}}
LINKED = {
    "type": "object",
    "properties": {"value": INTEGER, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "tricks": INTEGER}, "required": ["kind"]}

#: (type or "", keyword) -> schema, accepted texts, rejected texts.
KEYWORDS = {
    ("string", "minLength"): ({**STRING, "minLength": 2}, ['"ab"', '"éé"', '"abc"'], ['"a"', '"é"', '"\\n"', '"\t\t"']),
    ("string", "maxLength"): ({**STRING, "maxLength": 2}, ['""', '"éé"'], ['"abc"', '"\t"', '"""']),
    ("string", "pattern"): ({**STRING, "pattern": "^a(?:b[0-9]+)?$"}, ['"a"', '"ab1"'], ['"a1"', '"xa"', '"ab"']),
    ("string", "format"): ({**STRING, "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-13-01"', '"x"']),
    ("integer", "minimum"): ({**INTEGER, "minimum": -3}, ["-3", "0", "44"], ["-4", "-30", "2.0"]),
    ("integer", "maximum"): ({**INTEGER, "maximum": 120}, ["120", "-500", "99"], ["121", "1200"]),
    ("integer", "exclusiveMinimum"): ({**INTEGER, "exclusiveMinimum": 9.5}, ["10", "100"], ["9", "-10", "1"]),
    ("integer", "exclusiveMaximum"): ({**INTEGER, "exclusiveMaximum": 0}, ["-1", "-10"], ["0", "-0", "1"]),
    ("integer", "multipleOf"): ({**INTEGER, "multipleOf": 7}, ["0", "-7", "700"], ["1", "8", "-0", "007"]),
    ("number", "minimum"): ({**NUMBER, "minimum": 0.5}, ["0.5", "0.50", "1", "7.25"], ["0.49", "0", "-1", "5e-9"]),
    ("number", "maximum"): ({**NUMBER, "maximum": 1.25}, ["1.25", "1.2", "-9.5", "0"], ["1.26", "1.251", "2"]),
    ("number", "exclusiveMinimum"): ({**NUMBER, "exclusiveMinimum": 0}, ["0.001", "3"], ["0", "0.0", "-0.5"]),
    ("number", "exclusiveMaximum"): ({**NUMBER, "exclusiveMaximum": -1}, ["-1.1", "-2"], ["-1", "-1.0", "0"]),
    ("object", "properties"): (POINT, ["{}", '{"x": 1}', '{"y":2}', '{"x":1,"y":2}'], ['{"x":"a"}', '{"z":1}']),
    ("object", "required"): ({**POINT, "required": ["y"]}, ['{"y":1}', '{"x":1,"y":1}'], ["{}", '{"x":1}']),
    ("object", "additionalProperties"): (
        {**POINT, "additionalProperties": STRING},
        ['{"a":"b"}', '{"x":1,"xy":"b"}', '{"":"", "é":""}'],
        ['{"a":1}', '{"a":"b","x":"c"}', '{"\\u0078":"c"}', '{"x":1,"x":"c"}'],
    ),
    ("object", "patternProperties"): (
        {"type": "object", "patternProperties": {"^n[0-9]$": INTEGER}},
        ["{}", '{"n1":1,"n2":2}'],
        ['{"n1":"a"}', '{"x":1}', '{"n10":1}'],
    ),
    ("object", "propertyNames"): (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": INTEGER},
        ["{}", '{"ab":1}'],
        ['{"abc":1}', '{"a":"b"}', '{"\\u0061\\u0061\\u0061":1}'],
    ),
    ("object", "minProperties"): ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ("object", "maxProperties"): ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    ("array", "items"): ({"type": "array", "items": INTEGER}, ["[]", "[1]", "[1, 2]"], ['["a"]', '[1,"a"]', "[1,]"]),
    ("array", "prefixItems"): (
        {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
        ["[]", "[1]", '[1,"a"]'],
        ['["a"]', "[1,2]", '[1,"a",3]'],
    ),
    ("array", "minItems"): ({"type": "array", "minItems": 2}, ["[1,2]", "[1,2,3]"], ["[]", "[1]"]),
    ("array", "maxItems"): ({"type": "array", "items": INTEGER, "maxItems": 2}, ["[]", "[1,2]"], ["[1,2,3]"]),
    ("", "$ref"): (
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": INTEGER}},
        ["[1]"],
        ['["a"]'],
    ),
    ("", "anyOf"): ({"anyOf": [INTEGER, {**STRING, "maxLength": 1}]}, ["1", '"a"'], ["null", '"ab"']),
    ("", "oneOf"): (
        {"oneOf": [CAT, {"$ref": "#/$defs/d"}], "$defs": {"d": DOG}},
        ['{"kind":"cat","lives":9}', '{"kind":"dog","tricks":1}'],
        ['{"kind":"cat","tricks":1}', '{"kind":"cow"}'],
    ),
    ("", "allOf"): ({"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": INTEGER}}, ["1"], ['"a"']),
    ("", "enum"): ({"enum": [1, "é\n", None, {"a": [1]}]}, ["1", '"é\\n"', "null", '{"a": [1]}'], ["2", '"a"']),
    ("", "const"): ({"const": 'a"\\', "type": "string"}, ['"a\\"\\\\"'], ['"a"']),
}


def test_every_enforced_keyword_has_a_case():
    enforced = {(name, key) for name, keys in ENFORCED.items() for key in keys} | {("", key) for key in COMBINED}
    assert enforced == set(KEYWORDS)


@pytest.mark.parametrize(("schema", "accepted", "rejected"), KEYWORDS.values(), ids=[" ".join(key) for key in KEYWORDS])
def test_a_keyword_is_enforced(texts, schema, accepted, rejected):
    assert texts.accepted_by_schema(schema, accepted) == accepted
    assert texts.accepted_by_schema(schema, rejected) == []
    for text in accepted:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({}, ["null", "-0.5e-10", '{"a":[true, {"b":""}]}'], ["nul", "01", "{,}", "1e400", '"\\ud800"', "'a'"]),
        (True, ["1"], ["x"]),
        (STRING, ['"\\u00e9\\n\\"😀"', '"\\uD7FF"'], ['"a', '"\n"', '"\\x"', '"\\uDc00"']),
        ({"type": ["integer", "null"]}, ["1", "null"], ["true", "1.5"]),
        ({"type": ["string", "integer"], "minLength": 1, "minimum": 5}, ['"a"', "5"], ['""', "4"]),
        ({"minimum": 3}, ["3", "3.5"], ["2", '"a"']),
        ({"minimum": 3, "minLength": 2}, ["3", '"ab"'], ["2", '"a"', "null"]),
        ({"properties": {"a": INTEGER}}, ['{"a":1}'], ["1", '{"a":"b"}']),
        ({"type": "object"}, ["{}", '{"a":{"b":1}}'], ["[]"]),
        ({"type": "object", "additionalProperties": False}, ["{}", "{ }"], ['{"a":1}']),
        ({"type": "object", "required": ["b"]}, ['{"b":[1]}'], ["{}", '{"a":1}']),
        ({**POINT, "required": ["b"], "additionalProperties": STRING}, ['{"b":"c"}'], ['{"b":1}', "{}"]),
        ({**POINT, "additionalProperties": True}, ['{"z":[1]}', '{"x":1,"z":null}'], ['{"x":null}']),
        ({"type": "object", "properties": {'"é\\': INTEGER}}, ['{"\\"é\\\\":1}'], ['{"\\"é\\\\":"a"}']),
        (LINKED, ['{"value":1,"next":{"value":2,"next":null}}'], ['{"value":1,"next":{}}']),
        ({"type": "array", "prefixItems": [INTEGER], "items": STRING, "minItems": 2}, ['[1,"a"]'], ["[1]", "[1,2]"]),
        ({"type": "array", "prefixItems": [INTEGER, STRING], "maxItems": 1}, ["[]", "[1]"], ['[1,"a"]']),
        ({"type": "array", "uniqueItems": False, "items": INTEGER}, ["[1,1]"], ['["a"]']),
        ({"allOf": [True, {"title": "t"}, INTEGER]}, ["1"], ['"a"']),
        ({"allOf": [{}, {}]}, ["1", '"a"'], ["?"]),
        ({"allOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": INTEGER}}, ["1"], ['"a"']),
        ({"oneOf": [INTEGER, STRING, {"type": "null"}]}, ["1", '"a"', "null"], ["true"]),
        ({**INTEGER, "title": "t", "x-mine": 1, "default": "no"}, ["1"], ['"no"']),
        ({"$schema": "s", "$id": "i", "$comment": "c", **INTEGER}, ["1"], ["a"]),
    ],
)
def test_schemas_accept_and_reject_the_right_texts(texts, schema, accepted, rejected):
    assert texts.accepted_by_schema(schema, accepted) == accepted
    assert texts.accepted_by_schema(schema, rejected) == []


@pytest.mark.parametrize("length", [0, 1, 16, 17])
def test_whitespace_between_the_parts_is_limited(texts, length):
    blank = (" \n\t\r" * 5)[:length]
    text = f'{{{blank}"x"{blank}:{blank}1{blank},{blank}"y":2{blank}}}'
    assert texts.accepted_by_schema(POINT, [text]) == ([text] if length <= 16 else [])
    assert texts.accepted_by_schema(POINT, [f" {text}", f"{text} "]) == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": INTEGER}, r"\$\.not: this keyword is not enforced"),
        ({"if": INTEGER, "then": INTEGER}, r"\$\.if"),
        ({**POINT, "dependentRequired": {"x": ["y"]}}, r"\$\.dependentRequired"),
        ({**POINT, "dependentSchemas": {}}, r"\$\.dependentSchemas"),
        ({**POINT, "unevaluatedProperties": False}, r"\$\.unevaluatedProperties"),
        ({"type": "array", "items": {"type": "array", "contains": INTEGER}}, r"\$\.items\.contains"),
        ({"type": "array", "uniqueItems": True}, r"\$\.uniqueItems"),
        ({"type": "array", "items": [INTEGER]}, r"\$\.items: expected one schema, got a list"),
        ({"nullable": True, **INTEGER}, r"\$\.nullable"),
        ({"$dynamicRef": "#a"}, r"\$\.\$dynamicRef"),
        ({"$anchor": "a", **INTEGER}, r"\$\.\$anchor"),
        ({"$ref": "http://example.org/schema"}, r"\$\.\$ref: only references such as"),
        ({"$ref": "#/$defs/a~1b"}, r"only references such as"),
        ({"$ref": "#/$defs/none", "$defs": {}}, r"#/\$defs/none does not exist"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, r"\$\.\$defs\.a\.not"),
        (
            {"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": INTEGER}},
            r"\$\.minimum: not enforced together with \$ref",
        ),
        ({"type": "array", "items": {"$id": "x", **INTEGER}}, r"\$\.items\.\$id"),
        ({"anyOf": [INTEGER], "type": "integer"}, r"\$\.type: not enforced together with anyOf"),
        ({"anyOf": []}, r"\$\.anyOf: expected a non-empty list"),
        (
            {"allOf": [INTEGER, {"minimum": 3}]},
            r"\$\.allOf\[1\]: not enforced together with \[0\]; combine both in one schema",
        ),
        ({"minimum": 3, "allOf": [INTEGER]}, r"\$\.allOf: not enforced together with minimum"),
        ({"oneOf": [INTEGER, NUMBER]}, r"\$\.oneOf: not enforced: a value might match both \[0\] and \[1\]"),
        ({"oneOf": [CAT, POINT]}, r"might match both"),
        ({"oneOf": [{"enum": [1, 2]}, {"const": 1.0}]}, r"might match both"),
        ({"type": "integer", "enum": [1, "a"]}, r'\$\.enum: "a" is not of type integer'),
        ({"enum": []}, r"\$\.enum: expected a non-empty list"),
        ({"type": "date"}, r'\$\.type: expected one or more of string, .*, got "date"'),
        ({"type": []}, r"\$\.type: expected"),
        ({"type": "integer", "minLength": 2}, r"\$\.minLength: not enforced for type integer"),
        ({**NUMBER, "multipleOf": 0.5}, r"\$\.multipleOf: not enforced for type number\. With strict false it is left"),
        ({**INTEGER, "multipleOf": 2, "minimum": 3}, r"\$\.multipleOf: enforced only for type integer"),
        ({"type": ["integer", "number"], "multipleOf": 2}, r"\$\.multipleOf: enforced only for type integer"),
        ({**INTEGER, "multipleOf": 257}, r"\$\.multipleOf: expected a whole number from 1 to 256, got 257"),
        ({**INTEGER, "minimum": 5, "maximum": 4}, r"\$: there is no integer between"),
        ({**INTEGER, "exclusiveMinimum": 1, "exclusiveMaximum": 2}, r"there is no integer between"),
        ({**NUMBER, "minimum": 1, "exclusiveMaximum": 1}, r"there is no number between"),
        ({**NUMBER, "exclusiveMinimum": True}, r"\$\.exclusiveMinimum: expected a number"),
        ({**NUMBER, "minimum": 1e300}, r"expected a number from"),
        ({**STRING, "minLength": 3, "maxLength": 2}, r"\$\.maxLength: 2 is less than minLength, 3"),
        ({**STRING, "minLength": -1}, r"\$\.minLength: expected a whole number from 0 to 1000, got -1"),
        ({**STRING, "minLength": 100_000}, r"from 0 to 1000, got 100000"),
        ({**STRING, "maxLength": "3"}, r'\$\.maxLength: .*got "3"'),
        ({**STRING, "pattern": "a", "maxLength": 3}, r"\$\.maxLength: not enforced together with pattern"),
        ({**STRING, "format": "date", "pattern": "a"}, r"\$\.format: not enforced together with pattern"),
        ({**STRING, "format": "hostname"}, r'\$\.format: "hostname" is not enforced. Enforced are: date, '),
        ({**STRING, "pattern": "(?!a)b"}, r"\$\.pattern: regular expression '\(\?!a\)b', position 1: lookarounds"),
        ({**STRING, "pattern": '"'}, r"\$\.pattern: .* no character can match here"),
        ({**STRING, "pattern": 3}, r"\$\.pattern: expected a string, got integer"),
        ({**POINT, "minProperties": 1}, r"\$\.minProperties: not enforced together with properties"),
        ({**POINT, "patternProperties": {"a": {}}}, r"\$\.patternProperties: not enforced together with properties"),
        ({"type": "object", "minProperties": 2}, r"\$\.minProperties: enforced only up to 1"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, r"\$\.patternProperties: enforced only for one"),
        ({"type": "object", "patternProperties": {"a": {}}, "additionalProperties": True}, r"enforced only for one"),
        ({"type": "object", "propertyNames": INTEGER}, r"\$\.propertyNames: enforced only for schemas of type string"),
        ({"type": "object", "propertyNames": False}, r"\$\.propertyNames: false allows no value"),
        ({**POINT, "required": ["z"], "additionalProperties": False}, r'\$\.required: "z" is enforced only if'),
        ({**POINT, "required": "x"}, r"\$\.required: expected a list of names"),
        ({"type": "object", "properties": {"a": False}}, r"\$\.properties\.a: false allows no value"),
        ({"type": "object", "properties": []}, r"\$\.properties: expected an object, got array"),
        ({"type": "array", "prefixItems": [INTEGER], "items": False, "minItems": 2}, r"no array has this number"),
        ({"type": "array", "items": False, "minItems": 1}, r"no array has this number"),
        (False, r"\$: false allows no value"),
        ([], r"\$: a schema is an object or true, got array"),
    ],
)
def test_an_unenforceable_keyword_is_refused_by_name_and_path(schema, said):
    with pytest.raises(GrammarError, match=f"^json_schema: .*{said}"):
        translate_schema(json.dumps(schema), XGrammarOptions())


#: Schema, ignored keywords, texts that are then accepted, texts that are rejected.
LENIENT = [
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, ["$.uniqueItems"], ["[1,1]"], ['["a"]']),
    ({**POINT, "dependentRequired": {"x": ["y"]}}, ["$.dependentRequired"], ['{"x":1}'], ['{"x":"a"}']),
    ({"type": "array", "items": {**STRING, "format": "hostname"}}, ["$.items.format"], ['["?"]'], ["[1]"]),
    ({"properties": {"a": {**NUMBER, "multipleOf": 0.5}}}, ["$.properties.a.multipleOf"], ['{"a":0.3}'], ['{"a":""}']),
    ({**INTEGER, "multipleOf": 7, "minimum": 3}, ["$.multipleOf"], ["4"], ["2"]),
    ({**STRING, "pattern": "(?!a)b"}, ["$.pattern"], ['"a"'], ["1"]),
    ({**STRING, "maxLength": 1, "pattern": "a+"}, ["$.maxLength"], ['"aa"'], ['"b"']),
    ({**STRING, "minLength": 5000, "maxLength": 2}, ["$.minLength"], ['""'], ['"abc"']),
    ({"oneOf": [INTEGER, NUMBER]}, ["$.oneOf"], ["1", "1.5"], ['"a"']),
    ({"oneOf": [POINT, {"type": "object", "not": {}}]}, ["$.oneOf[1].not", "$.oneOf"], ['{"x":1}', '{"z":1}'], ["1"]),
    ({"oneOf": [INTEGER, {**STRING, "format": "hostname"}]}, ["$.oneOf[1].format"], ["1", '"a"'], ["1.5"]),
    ({"allOf": [INTEGER, {"minimum": 3}]}, ["$.allOf[1]"], ["1"], ['"a"']),
    ({"allOf": [{"not": {"const": 1}}, {}, INTEGER]}, ["$.allOf[0].not"], ["1"], ['"a"']),
    (
        {"allOf": [{"$ref": "http://example.org/schema"}, INTEGER, POINT]},
        ["$.allOf[0].$ref", "$.allOf[2]"],
        ["1"],
        ["{}"],
    ),
    ({"$ref": "#/$defs/a", "$defs": {"a": {**INTEGER, "not": {"const": 1}}}}, ["$.$defs.a.not"], ["1"], ['"a"']),
    ({"$ref": "http://example.org/schema", "title": "t"}, ["$.$ref"], ["1"], ["?"]),
    ({**POINT, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, ["$.anyOf"], ["{}", '{"x":1}'], ['{"x":""}']),
    ({"type": "object", "anyOf": [POINT]}, ["$.type"], ['{"x":1}'], ["1"]),
    ({**POINT, "patternProperties": {"a": {}}}, ["$.patternProperties"], ['{"x":1}'], ['{"x":""}']),
    (
        {"required": ["z"], "patternProperties": {"a": {}}, "additionalProperties": False},
        ["$.patternProperties"],
        ['{"z":1}'],
        ["{}"],
    ),
    ({"type": "object", "minProperties": 2}, ["$.minProperties"], ['{"a":1}'], ["{}"]),
    ({"type": "object", "propertyNames": {"type": "integer"}}, ["$.propertyNames"], ['{"a":1}'], ["[]"]),
    ({"type": "array", "items": {"$id": "x", **INTEGER}}, ["$.items.$id"], ["[true]"], ["1"]),
    ({"not": {}, "if": True, "then": {}}, ["$.not", "$.if", "$.then"], ["1"], ["?"]),
    (POINT, [], ["{}"], ["1"]),
]


@pytest.mark.parametrize(("schema", "unenforced", "accepted", "rejected"), LENIENT)
def test_a_lenient_translation_ignores_and_reports_unenforceable_keywords(
    texts, schema, unenforced, accepted, rejected
):
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict=False)
    assert texts.backend.check(spec) == tuple(unenforced)
    assert texts.accepted_by_spec(spec, accepted + rejected) == accepted
    if unenforced:
        with pytest.raises(GrammarError, match=re.escape(unenforced[0])):
            translate_schema(json.dumps(schema), XGrammarOptions(), strict=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"anyOf": []},
        {"uniqueItems": "yes"},
        {"type": "array", "items": [INTEGER]},
        {**STRING, "pattern": "(a"},
        {**STRING, "minLength": -1},
        {**NUMBER, "minimum": "3"},
        {**INTEGER, "multipleOf": 0},
        {"not": 3},
        {"$ref": "#/nowhere"},
        {"$ref": 3},
        {**INTEGER, "minimum": 5, "maximum": 4},
        {"properties": {"a": {"required": "b"}}},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_malformed_schemas_and_those_without_a_value_are_always_refused(schema):
    for strict in (True, False):
        with pytest.raises(GrammarError, match=r"^json_schema: "):
            translate_schema(json.dumps(schema), XGrammarOptions(), strict)


@pytest.mark.parametrize(
    ("whitespace", "separators"), [("spaced", (", ", ": ")), ("compact", (",", ":")), ("flexible", (" ,\n", " : "))]
)
def test_whitespace_follows_the_option(texts_with, whitespace, separators):
    texts = texts_with(XGrammarOptions(whitespace=whitespace))
    cases = [
        ({}, {"a": [1, {"b": None}], "c": {}}),
        ({**POINT, "additionalProperties": INTEGER}, {"x": 1, "y": 2, "z": 3}),
        (POINT, {"y": 2}),
        ({**POINT, "additionalProperties": INTEGER}, {"z": 3}),
        ({"type": "array", "prefixItems": [INTEGER, STRING], "items": INTEGER}, [1, "a", 2, 3]),
        ({"type": "array", "items": INTEGER}, [1, 2]),
        ({"additionalProperties": INTEGER}, {"a": 1, "b": 2}),
    ]
    for schema, value in cases:
        text = json.dumps(value, separators=separators)
        assert texts.accepted_by_schema(schema, [text]) == [text]
        for other in ((", ", ": "), (",", ":"), (" , ", ":"), ("\n,", ":"), (", ", ":"), (",", ": ")):
            other_text = json.dumps(value, separators=other)
            is_accepted = whitespace == "flexible" or other_text == text
            assert texts.accepted_by_schema(schema, [other_text]) == [other_text] * is_accepted
    assert texts.accepted_by_schema({"const": {"a": [1, 2]}}, ['{"a": [1, 2]}', '{"a":[1,2]}']) == [
        '{"a":[1,2]}' if whitespace == "compact" else '{"a": [1, 2]}'
    ]


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", '{"const": NaN}', '{"minimum": Infinity}', "\x00", "[" * 10**5])
def test_text_that_is_not_json_is_refused(text):
    with pytest.raises(GrammarError, match=r"^json_schema: "):
        translate_schema(text, XGrammarOptions())


def test_deep_nesting_is_refused_and_recursion_is_not():
    schema = INTEGER
    for _ in range(60):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match="levels deep"):
        translate_schema(json.dumps(schema), XGrammarOptions())
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(60)}
    with pytest.raises(GrammarError, match="levels deep"):
        translate_schema(json.dumps({"$defs": chain, "$ref": "#/$defs/d0"}), XGrammarOptions())
    translate_schema(json.dumps(LINKED), XGrammarOptions())


def test_annotations_and_assertions_are_disjoint():
    assert not ANNOTATIONS & (set().union(*ENFORCED.values()) | set(COMBINED))


# -- Every generated text is valid


def generate(matcher, draw, limit=300):
    """Sample random bytes, mostly printable ones, and the end as soon as possible; None if the text gets too long."""
    mask, out = np.zeros((1, 9), dtype=np.int32), bytearray()
    while len(out) < limit:
        matcher.fill_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed, f"nothing may follow {bytes(out)!r}"
        if 256 in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return out.decode()
        allowed = [byte for byte in allowed if byte != 256]
        handy = [byte for byte in allowed if byte in b'"\\:,]}0123456789abcxyu']
        byte = draw.choice(handy if handy and draw.random() < 0.9 else allowed)
        assert matcher.accept(byte)
        out.append(byte)
    return None


class SchemaMaker:
    """Draws random schemas with the enforced keywords."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def schema(self, depth=3):
        makers = [self.integer, self.number, self.string, self.values]
        if depth:
            makers += [self.record, self.map, self.array, self.union] * 2
        return self.draw.choice(makers)(depth)

    def maybe(self, **keywords):
        return {key: value for key, value in keywords.items() if self.draw.random() < 0.5}

    def integer(self, depth):
        low = self.draw.randint(-200, 200)
        bounds = self.maybe(minimum=low, maximum=low + self.draw.randint(0, 300))
        return INTEGER | (bounds or self.maybe(multipleOf=self.draw.randint(1, 30)))

    def number(self, depth):
        low = round(self.draw.uniform(-3, 3), self.draw.randint(0, 3))
        high = low + round(self.draw.uniform(0.1, 3), 2)
        return NUMBER | self.maybe(minimum=low, exclusiveMaximum=high)

    def string(self, depth):
        length = self.draw.randint(0, 3)
        choices = [
            {},
            self.maybe(minLength=length, maxLength=length + self.draw.randint(0, 3)),
            {"pattern": self.draw.choice(["^a(bc?)*$", "^[^a-m]{1,3}$", "^(?:x|y[0-9]+)?$", "^\\w-\\d$"])},
            {"format": self.draw.choice(["date", "ipv4", "time"])},
        ]
        return STRING | self.draw.choice(choices)

    def values(self, depth):
        return {"enum": self.draw.sample([None, True, 0, -1.5, "", 'a"b', "é", [1, {"a": 2}], {}], 3)}

    def record(self, depth):
        names = self.draw.sample(["a", "ab", "é", 'b"', "", "x y"], self.draw.randint(1, 4))
        schema = {"type": "object", "properties": {name: self.schema(depth - 1) for name in names}}
        extra = self.draw.choice([False, True, self.schema(depth - 1)])
        return schema | self.maybe(required=self.draw.sample(names, 1), additionalProperties=extra)

    def map(self, depth):
        keys = self.maybe(propertyNames={"maxLength": 2}, maxProperties=2, minProperties=1)
        return {"type": "object", "additionalProperties": self.schema(depth - 1)} | keys

    def array(self, depth):
        least = self.draw.randint(0, 2)
        counts = self.maybe(minItems=least, maxItems=least + 1)
        prefix = self.maybe(prefixItems=[self.schema(depth - 1) for _ in range(2)])
        return {"type": "array", "items": self.schema(depth - 1)} | counts | prefix

    def union(self, depth):
        return {"anyOf": [self.schema(depth - 1), self.schema(depth - 1)]}


@pytest.mark.few(seed=10)
@pytest.mark.parametrize("seed", range(60))
def test_every_generated_text_is_valid(texts, seed):
    maker = SchemaMaker(seed)
    schema = maker.schema()
    checker = jsonschema.FormatChecker(["date", "ipv4"])
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    matchers = [texts.matcher("json_schema", json.dumps(schema)) for _ in range(20)]
    for text in filter(None, [generate(matcher, maker.draw) for matcher in matchers]):
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_every_format_can_be_generated(texts, name):
    draw = random.Random(1)
    matchers = [texts.matcher("json_schema", json.dumps({**STRING, "format": name})) for _ in range(10)]
    assert any(generate(matcher, draw) for matcher in matchers)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date", ["2000-02-29", "1999-12-31"], ["1900-02-29", "2001-04-31", "2001-1-1", "0000-01-01", "0000-02-29"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "12:00Z", "12:00:00", "12:00:005Z"]),
        ("date-time", ["2024-01-31T12:00:00Z"], ["2024-01-31", "2024-02-31T12:00:00Z"]),
        ("duration", ["P1Y2M3D", "PT1H", "P2W", "P1DT2M"], ["P", "PT", "1D", "P1Y2D", "P1DT"]),
        ("email", ["a.b@c.org"], ["a@b", "@c.org", "a..b@c.org", "a b@c.org"]),
        ("ipv4", ["0.0.0.0", "255.1.20.3"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
        ("uri", ["https://a.org/b?c", "ftp://a"], ["a.org", "https://", "https://a b"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "123e4567-e89b-12d3-a456-42661417400g"]),
    ],
)
def test_formats_are_enforced(texts, name, right, wrong):
    schema = {**STRING, "format": name}
    assert texts.accepted_by_schema(schema, map(json.dumps, right)) == [json.dumps(text) for text in right]
    assert texts.accepted_by_schema(schema, map(json.dumps, wrong)) == []


# -- The docs page

PAGE = (Path(__file__).parents[3] / "docs" / "structured-generation.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted({*ENFORCED["object"], *ENFORCED["string"], *COMBINED, *FORMATS}))
def test_the_docs_name_the_enforced_keywords(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize(("name", "keywords"), ENFORCED.items())
def test_the_docs_list_the_keywords_of_each_type(name, keywords):
    if keywords:
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
        assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == keywords


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 10, "maximum": 7},
        {"minimum": -1, "maximum": -2},
        {"minimum": 5, "maximum": 4.9},
        {"exclusiveMinimum": 2.5, "exclusiveMaximum": 0.5},
        {"exclusiveMinimum": 2.5, "maximum": 2.5},
    ],
)
def test_crossing_bounds_are_refused(bounds):
    with pytest.raises(GrammarError, match="there is no number between these bounds"):
        translate_schema(json.dumps({**NUMBER, **bounds}), XGrammarOptions())


def test_branches_that_take_too_long_to_compare_are_refused_quickly():
    names = [f"p{i}" for i in range(100)]
    left, right = (
        {"type": "object", "required": names, "properties": {n: {"$ref": f"#/$defs/{d}"} for n in names}} for d in "BA"
    )
    schema = {"$defs": {"A": left, "B": right}, "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    before_s = time.process_time()
    with pytest.raises(GrammarError, match=r"\$\.oneOf: not enforced: comparing the branches takes too long"):
        translate_schema(json.dumps(schema), XGrammarOptions())
    assert time.process_time() - before_s < 20


def test_branches_with_many_values_are_refused_quickly():
    def branch(letter):
        values = {"enum": [f"{letter}{i}" for i in range(900)]}
        return {"type": "object", "required": ["a"], "properties": {"a": values}}

    definitions = {letter: branch(letter) for letter in "abcdefghijklmnop"}
    several = [{"$ref": f"#/$defs/{letter}"} for letter in definitions]
    translate_schema(json.dumps({"$defs": definitions, "oneOf": several}), XGrammarOptions())  # 120 pairs
    again = [{"allOf": [one], "title": str(i)} for i, one in enumerate(several)]
    many = {
        "$defs": definitions,
        "oneOf": [*again, *({**one, "title": "x"} for one in ({"allOf": [s]} for s in several))],
    }
    with pytest.raises(GrammarError, match=r"\$\.oneOf: not enforced"):
        translate_schema(json.dumps(many), XGrammarOptions())


def test_a_reference_may_go_through_a_list(texts):
    schema = {"type": "array", "prefixItems": [{"const": "a"}], "items": {"$ref": "#/prefixItems/0"}}
    assert texts.accepted_by_schema(schema, ['["a","a"]', '["a","b"]', '["a"]']) == ['["a","a"]', '["a"]']
    with pytest.raises(GrammarError, match="does not exist"):
        translate_schema(json.dumps({**schema, "items": {"$ref": "#/prefixItems/1"}}), XGrammarOptions())


def test_the_list_of_ignored_keywords_is_limited():
    names = {f"a{i}": {"type": "null", "uniqueItems": True} for i in range(1500)}
    schema = {"type": "object", "properties": {"n" * 10_000: {"type": "object", "properties": names}}}
    with pytest.raises(
        GrammarError, match="the paths of keywords that are not enforced have more than 131,072 characters"
    ):
        translate_schema(json.dumps(schema), XGrammarOptions(), strict=False)


@pytest.mark.parametrize("schema", [{"enum": [9007199254740993]}, {"const": {"a": [-(2**64)]}}, {"enum": ["a", 2**80]}])
def test_whole_numbers_that_llguidance_would_round_are_refused(schema, byte_context):
    backend = LLGuidanceBackend(LLGuidanceOptions(), byte_context)
    with pytest.raises(GrammarError, match=r"\$\.(enum|const): not enforced for numbers outside -2\*\*53 to 2\*\*53"):
        backend.check(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def test_a_bound_with_a_point_is_not_rounded_by_llguidance(texts_of, byte_context):
    llg = texts_of(LLGuidanceBackend(LLGuidanceOptions(), byte_context))
    schema = {"type": "integer", "minimum": 9007199254740991.0, "maximum": 9007199254740992}
    right = ["9007199254740991", "9007199254740992"]
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert llg.accepted_by_spec(spec, ["9007199254740990", *right, "9007199254740993"]) == right


@pytest.mark.parametrize("required", [[], ["a" * 101]])
def test_long_property_names_are_distinguished(texts, required):
    name = "a" * 101
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"}},
        "required": required,
        "additionalProperties": {"type": "boolean"},
    }
    own = f'"{name}": 1'
    right = [f"{{{own}}}", f'{{{own}, "a": true}}', f'{{{own}, "{"a" * 60}b": true}}', f'{{{own}, "b{name}": true}}']
    wrong = [f'{{{own}, "{name}": true}}', f'{{"{name}": true}}', f'{{{own}, "a": 1}}']
    assert texts.accepted_by_schema(schema, right + wrong) == right


@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("translate", TRANSLATIONS)
def test_bounds_with_very_many_decimals_are_refused_with_their_path(translate, key):
    schema = {"properties": {"n": {"type": "number", key: 1e-120}}, "type": "object"}
    with pytest.raises(GrammarError, match=rf"^json_schema: \$\.properties\.n\.{key}: .*40 decimals, got 1e-120"):
        translate(json.dumps(schema), JsonOptions(), strict=True)
    assert translate(json.dumps(schema), JsonOptions(), strict=False).unenforced == (f"$.properties.n.{key}",)
    translate(json.dumps({"type": "number", key: 1e-40}), JsonOptions(), strict=True)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"enum": ["a", "\ud800"]}, "$.enum[1]"),
        ({"type": "object", "properties": {"\udfff": {}}}, "$.properties"),
        ({"const": {"a": ["\ud83d"]}}, "$.const.a[0]"),
    ],
)
@pytest.mark.parametrize("translate", TRANSLATIONS)
@pytest.mark.parametrize("is_ascii", [False, True])
def test_unpaired_surrogates_are_refused_with_their_path(translate, schema, path, is_ascii):
    with pytest.raises(GrammarError, match=re.escape(f"json_schema: {path}: an unpaired surrogate")):
        translate(json.dumps(schema, ensure_ascii=is_ascii), JsonOptions(), strict=False)
    translate('{"enum": ["\\ud83d\\ude00", "\\\\ud800"]}', JsonOptions(), strict=True)


def test_similar_names_are_searched_only_if_they_are_reported():
    schema = json.dumps({f"minLenth{i}": 1 for i in range(4000)})
    start_s = time.thread_time()
    assert len(translate_schema(schema, JsonOptions(), strict=False).unenforced) == 4000
    lenient_s = time.thread_time() - start_s
    with pytest.raises(GrammarError, match="did you mean 'minLength'"):
        translate_schema(schema, JsonOptions(), strict=True)
    start_s = time.thread_time()
    for i in range(40):
        with pytest.raises(GrammarError, match="did you mean 'minLength'"):
            translate_schema(json.dumps({f"minLenth{i}": 1}), JsonOptions(), strict=True)
    assert lenient_s < 50 * (time.thread_time() - start_s)


@pytest.mark.parametrize("length", [1000, 1001, 10_000])
def test_lengths_are_enforced_up_to_the_documented_limit(texts, texts_of, byte_context, length):
    schema = {"type": "string", "maxLength": length}
    llg = texts_of(LLGuidanceBackend(LLGuidanceOptions(), byte_context))
    right, wrong = json.dumps("a" * length), json.dumps("a" * (length + 1))
    for one in (texts, llg):
        assert one.accepted_by_schema(schema, [right, wrong, '""']) == [right, '""']
    items = {"type": "array", "items": {"const": 1}, "maxItems": length}
    right, wrong = json.dumps([1] * length), json.dumps([1] * (length + 1))
    for one in (texts, llg):
        assert one.accepted_by_schema(items, [right, wrong]) == [right]


@pytest.mark.parametrize("translate", TRANSLATIONS)
def test_lengths_above_the_limit_are_refused_with_their_path(translate):
    schema = json.dumps({"properties": {"a": {"type": "string", "maxLength": 10_001}}})
    with pytest.raises(GrammarError, match=r"\$\.properties\.a\.maxLength: expected .* 10000, got 10001"):
        translate(schema, JsonOptions(), strict=True)
    assert translate(schema, JsonOptions(), strict=False).unenforced == ("$.properties.a.maxLength",)


@pytest.mark.parametrize(
    "schema", [{"type": "object", "properties": {}}, {"properties": {}, "additionalProperties": False}]
)
def test_an_object_without_allowed_properties_is_empty(texts, texts_of, byte_context, schema):
    llg = texts_of(LLGuidanceBackend(LLGuidanceOptions(), byte_context))
    schema = {"type": "object", **schema}
    for one in (texts, llg):
        assert one.accepted_by_schema(schema, ["{}", '{"a": 1}']) == ["{}"]
        assert one.accepted_by_schema({**schema, "additionalProperties": {}}, ["{}", '{"a": 1}']) == ["{}", '{"a": 1}']


@pytest.mark.parametrize("value", [1e300, 1e23, -1e300, 123456789012345678901234567890.0])
@pytest.mark.parametrize("place", ["const", "enum", "within"])
def test_floats_that_llguidance_would_write_differently_are_refused(value, place):
    schema = {"const": {"const": value}, "enum": {"enum": ["a", value]}, "within": {"const": {"a": [value]}}}[place]
    with pytest.raises(GrammarError, match=r"\$\.(enum|const): not enforced for numbers outside"):
        prepare_schema(json.dumps(schema), LLGuidanceOptions())


def test_more_properties_than_compile_quickly_are_refused():
    def schema(num_optional, num_required=0):
        names = [f"k{i}" for i in range(num_optional + num_required)]
        properties = {name: {"type": "integer"} for name in names}
        return {"type": "object", "properties": properties, "required": names[num_optional:]}

    for right in (schema(800), schema(0, 3000), {"type": "object", "properties": {"a": schema(560), "b": schema(560)}}):
        translate_schema(json.dumps(right), JsonOptions())
    for wrong, says in (
        (schema(801), r"\$\.properties: 801 properties are optional, expected at most 800"),
        (schema(0, 3001), r"\$\.properties: the schema has more than 3,000 properties in total"),
        (
            {"type": "object", "properties": {"a": schema(600), "b": schema(600)}},
            r"\$\.properties\.b\.properties: 600 properties are optional",
        ),
    ):
        with pytest.raises(GrammarError, match=says):
            translate_schema(json.dumps(wrong), JsonOptions(), strict=False)
