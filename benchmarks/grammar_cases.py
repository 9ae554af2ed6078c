"""Test cases for grammar backends: specifications, each with texts that meet it and texts that violate it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from grammar_judges import Judge, choice_judge, regex_judge, schema_judge, tag_judge

from graftlm.contracts import GrammarKind

__all__ = ["Case", "cases"]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the support table.

    Attributes:
        section: heading of the table that contains the row.
        feature: the tested feature, such as a keyword.
        spec: the specification, as text.
        valid: texts that meet the specification; a backend that enforces the specification allows them.
        invalid: short texts that violate the specification.
        judge: function that returns whether a text meets the specification.
    """

    section: str
    feature: str
    kind: GrammarKind
    spec: str
    valid: tuple[str, ...]
    invalid: tuple[str, ...]
    judge: Judge


#: (feature, schema, valid texts, invalid texts)
_SchemaRow: TypeAlias = tuple[str, Any, tuple[str, ...], tuple[str, ...]]

_NODE: Final = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}},
    "required": [],
    "additionalProperties": False,
}
_COUNT: Final = {"type": "integer", "minimum": 0}
_AB: Final = {"a": {"type": "integer"}, "b": {"type": "integer"}}

_SCHEMAS: Final[Mapping[str, tuple[_SchemaRow, ...]]] = {
    "Types and values": (
        ("type", {"type": "string"}, ('"a"',), ("1", "null", "a")),
        ("type", {"type": "integer"}, ("-12",), ("1.5", '"1"', "01")),
        ("type", {"type": "number"}, ("1.5",), ('"1"', "true", "1.")),
        ("type", {"type": "boolean"}, ("true",), ("1", "True")),
        ("type", {"type": "null"}, ("null",), ("0", "false")),
        ("type", {"type": "object"}, ('{"a": 1}',), ("[]", '{"a"}')),
        ("type", {"type": "array"}, ('[1, "a"]',), ("{}", "[1,]")),
        ("type", {"type": ["integer", "null"]}, ("1", "null"), ('"a"', "1.5")),
        ("enum", {"enum": ["a", 1, None]}, ('"a"', "1", "null"), ('"b"', "2")),
        ("enum", {"type": "string", "enum": ["a", "b"]}, ('"b"',), ('"c"', "1")),
        ("enum", {"enum": [{"a": [1, 2]}]}, ('{"a": [1, 2]}',), ('{"a": [2, 1]}', "{}")),
        ("const", {"const": "é\n"}, ('"é\\n"',), ('"e"', '"é"')),
        ("boolean schema", True, ("1", "[]"), ("a", "{")),
        ("boolean schema", {"properties": {"a": False}}, ("{}",), ('{"a": 1}',)),
    ),
    "Strings": (
        ("minLength", {"type": "string", "minLength": 3}, ('"abc"',), ('"ab"', '""')),
        ("maxLength", {"type": "string", "maxLength": 3}, ('"abc"', '""'), ('"abcd"',)),
        ("pattern", {"type": "string", "pattern": "^[a-c]{2}$"}, ('"ab"',), ('"a"', '"abc"', '"zz"')),
        ("pattern", {"type": "string", "pattern": "b+"}, ('"bb"',), ('"a"', '""')),
        ("pattern with maxLength", {"pattern": "^a+$", "maxLength": 2}, ('"aa"',), ('"aaa"', '"b"')),
        ("format with maxLength", {"format": "email", "maxLength": 9}, ('"a@bb.com"',), ('"abcd@bb.com"', '"a"')),
        ("contentEncoding", {"type": "string", "contentEncoding": "base64"}, ('"YQ=="',), ("1",)),
        ("contentMediaType", {"type": "string", "contentMediaType": "text/html"}, ('"a"',), ("1",)),
    ),
    "Numbers": (
        ("minimum", {"type": "integer", "minimum": -3}, ("-3", "12"), ("-4", "-10")),
        ("minimum", {"type": "number", "minimum": 2.5}, ("2.5", "10"), ("2.4", "-3")),
        ("maximum", {"type": "integer", "maximum": 12}, ("12", "-99"), ("13", "100")),
        ("maximum", {"type": "number", "maximum": -0.5}, ("-0.5", "-7"), ("-0.4", "0")),
        ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 0}, ("1",), ("0", "-1")),
        ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, ("0.1",), ("0", "0.0", "-1")),
        ("exclusiveMinimum", {"exclusiveMinimum": 42, "maximum": 42.25}, ("42.2",), ("42", "42.0", "42.3")),
        ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, ("9",), ("10",)),
        ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1}, ("0.9",), ("1", "1.0", "2")),
        ("both bounds", {"type": "integer", "minimum": 8, "maximum": 120}, ("8", "99", "120"), ("7", "121", "1")),
        ("multipleOf", {"type": "integer", "multipleOf": 7}, ("14", "0"), ("15", "1")),
        ("multipleOf", {"type": "integer", "multipleOf": 1000}, ("2000",), ("2001",)),
        ("multipleOf", {"type": "number", "multipleOf": 0.5}, ("1.5",), ("1.2",)),
        (
            "multipleOf with bounds", {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 9},
            ("5",), ("0", "6"),
        ),
    ),
    "Objects": (
        ("properties", {"properties": {"a": {"type": "integer"}}}, ('{"a": 1}', "{}"), ('{"a": "b"}',)),
        ("required", {"properties": _AB, "required": ["b"]}, ('{"b": 1}', '{"a": 1, "b": 2}'), ("{}", '{"a": 1}')),
        ("required, not in properties", {"required": ["a"]}, ('{"a": 1}',), ("{}",)),
        ("additionalProperties", {"properties": _AB, "additionalProperties": False}, ('{"a": 1}',), ('{"c": 1}',)),
        ("additionalProperties", {"additionalProperties": {"type": "integer"}}, ('{"c": 1}',), ('{"c": "a"}',)),
        (
            "properties, 20 optional",
            {"properties": {f"p{i}": {"type": "null"} for i in range(20)}, "additionalProperties": False},
            ("{}", '{"p3": null}', '{"p0": null, "p19": null}'),
            ('{"p20": null}', '{"p1": 1}'),
        ),
        (
            "additionalProperties",
            {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
            ('{"a": null, "c": 1}',),
            ('{"a": null, "c": "d"}', '{"a": 1}'),
        ),
        (
            "patternProperties", {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
            ("{}",), ('{"ab": "c"}', '{"b": 1}'),
        ),
        ("patternProperties", {"patternProperties": {"^a+$": {"type": "integer"}}}, ('{"aa": 1}',), ('{"a": "c"}',)),
        (
            "patternProperties, two", {"patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 1}}},
            ('{"ab": 1}',), ('{"ab": 0}',),
        ),
        (
            "patternProperties with properties", {"properties": _AB, "patternProperties": {"^c$": {"type": "null"}}},
            ('{"a": 1}',), ('{"c": 1}',),
        ),
        ("propertyNames", {"propertyNames": {"pattern": "^[a-b]+$"}}, ('{"ab": 1}', "{}"), ('{"c": 1}',)),
        ("propertyNames", {"propertyNames": {"enum": ["a", "b"]}}, ('{"a": 1}',), ('{"c": 1}',)),
        (
            "propertyNames with properties", {"properties": _AB, "propertyNames": {"maxLength": 1}},
            ('{"a": 1}',), ('{"cc": 1}',),
        ),
        ("minProperties", {"type": "object", "minProperties": 1}, ('{"a": 1}',), ("{}",)),
        (
            "minProperties", {"type": "object", "minProperties": 2},
            ('{"a": 1, "b": 2}',), ('{"a": 1}', '{"a": 1, "a": 2}'),
        ),
        ("minProperties with properties", {"properties": _AB, "minProperties": 1}, ('{"a": 1}',), ("{}",)),
        ("maxProperties", {"type": "object", "maxProperties": 1}, ('{"a": 1}', "{}"), ('{"a": 1, "b": 2}',)),
        (
            "maxProperties with properties", {"properties": _AB, "maxProperties": 1},
            ('{"a": 1}',), ('{"a": 1, "b": 2}',),
        ),
        ("dependentRequired", {"properties": _AB, "dependentRequired": {"a": ["b"]}}, ('{"b": 1}',), ('{"a": 1}',)),
        (
            "dependentSchemas", {"properties": _AB, "dependentSchemas": {"a": {"required": ["b"]}}},
            ('{"b": 1}',), ('{"a": 1}',),
        ),
        ("unevaluatedProperties", {"properties": _AB, "unevaluatedProperties": False}, ('{"a": 1}',), ('{"c": 1}',)),
    ),
    "Arrays": (
        ("items", {"items": {"type": "integer"}}, ("[1, 2]", "[]"), ('["a"]', "[1, null]")),
        ("items", {"type": "array", "items": False}, ("[]",), ("[1]",)),
        ("prefixItems", {"prefixItems": [{"type": "integer"}, {"type": "null"}]}, ("[1, null]",), ("[null]", "[1, 2]")),
        (
            "prefixItems with items", {"prefixItems": [{"type": "integer"}], "items": {"type": "null"}},
            ("[1, null]",), ("[1, 2]", "[null]"),
        ),
        ("prefixItems with items", {"prefixItems": [{"type": "integer"}], "items": False}, ("[1]",), ("[1, 2]",)),
        ("minItems", {"type": "array", "minItems": 2}, ("[1, 2]",), ("[]", "[1]")),
        ("maxItems", {"type": "array", "maxItems": 2}, ("[]", "[1, 2]"), ("[1, 2, 3]",)),
        (
            "minItems with prefixItems", {"prefixItems": [{"type": "integer"}], "minItems": 2},
            ("[1, 2]",), ("[1]", "[]"),
        ),
        ("contains", {"type": "array", "contains": {"type": "null"}}, ("[1, null]",), ("[]", "[1]")),
        (
            "minContains", {"type": "array", "contains": {"type": "null"}, "minContains": 2},
            ("[null, null]",), ("[null]",),
        ),
        (
            "maxContains", {"type": "array", "contains": {"type": "null"}, "maxContains": 1},
            ("[null]",), ("[null, null]",),
        ),
        ("uniqueItems", {"items": {"enum": [1, 2]}, "uniqueItems": True}, ("[1, 2]",), ("[1, 1]",)),
        ("unevaluatedItems", {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, ("[1]",), ("[1, 2]",)),
    ),
    "Combinations": (
        ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("1", "null"), ('"a"',)),
        (
            "anyOf beside keywords", {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}]},
            ("5",), ("3", "null"),
        ),
        ("oneOf, disjoint", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, ("1", "null"), ('"a"',)),
        (
            "oneOf, disjoint by a property",
            {"oneOf": [{"type": "object", "properties": {"t": {"const": t}}, "required": ["t"]} for t in "ab"]},
            ('{"t": "a"}',), ('{"t": "c"}',),
        ),
        (
            "oneOf, overlapping", {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 3}]},
            ("5", "0"), ("2",),
        ),
        ("allOf, one", {"allOf": [{"type": "integer"}]}, ("1",), ("null",)),
        (
            "allOf, several", {"allOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 3}]},
            ("2",), ("0", "4"),
        ),
        ("allOf beside keywords", {"properties": _AB, "allOf": [{"required": ["a"]}]}, ('{"a": 1}',), ("{}",)),
        ("not", {"not": {"type": "string"}}, ("1",), ('"a"',)),
        ("not", {"type": "integer", "not": {"const": 3}}, ("4",), ("3",)),
        (
            "if, then, else",
            {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}, "else": {"maximum": 1}},
            ("6", "1"), ("7", "3"),
        ),
    ),
    "References": (
        ("$ref to $defs", {"$defs": {"n": _COUNT}, "$ref": "#/$defs/n"}, ("3",), ("-1", "null")),
        (
            "$ref to a property", {"properties": {"a": _COUNT, "b": {"$ref": "#/properties/a"}}, "required": ["b"]},
            ('{"b": 1}',), ('{"b": -1}',),
        ),
        (
            "$ref, recursive", {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
            ('{"next": {"next": {}}}',), ('{"next": 1}',),
        ),
        ("$ref to #", {"type": "array", "items": {"$ref": "#"}}, ("[[], [[]]]",), ("[1]",)),
        ("$ref beside keywords", {"$defs": {"n": _COUNT}, "$ref": "#/$defs/n", "maximum": 5}, ("5",), ("6", "-1")),
        ("$ref with ~1", {"$defs": {"a/b": _COUNT}, "$ref": "#/$defs/a~1b"}, ("3",), ("-1",)),
        ("$ref into a list", {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/anyOf/0"}}]}, ("[null]",), ("[1]",)),
        ("$ref to another document", {"$ref": "https://example.com/count"}, ("3",), ("-1",)),
        ("$anchor", {"$defs": {"n": {"$anchor": "count", **_COUNT}}, "$ref": "#count"}, ("3",), ("-1",)),
        (
            "$dynamicRef", {"$defs": {"n": {"$dynamicAnchor": "count", **_COUNT}}, "$dynamicRef": "#count"},
            ("3",), ("-1",),
        ),
        (
            "$id below the root",
            {"$defs": {"n": {"$id": "https://example.com/n", **_COUNT}}, "$ref": "https://example.com/n"},
            ("3",), ("-1",),
        ),
    ),
}  # fmt: skip

#: format -> (valid strings, invalid strings)
_FORMATS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "date": ("2024-02-29", ("2023-02-29", "2024-13-01", "24-01-01")),
    "time": ("12:34:56Z", ("24:00:00Z", "12:34:56", "12:60:00Z")),
    "date-time": ("2024-02-29T12:34:56Z", ("2023-02-29T12:34:56Z", "2024-02-29", "2024-01-01T12:34:56")),
    "duration": ("P1DT2H", ("P", "1D", "PT", "P1H")),
    "email": ("ana@example.com", ("ana", "@example.com", "a b@c.de")),
    "idn-email": ("ana@example.com", ("ana", "@example.com")),
    "hostname": ("www.example.com", ("-a.com", "a..b", "a_b")),
    "idn-hostname": ("www.example.com", ("-a.com", "a..b")),
    "ipv4": ("192.168.0.255", ("192.168.0.256", "1.2.3", "1.2.3.4.5")),
    "ipv6": ("2001:db8::1", ("2001:db8", "::g", "1.2.3.4")),
    "uri": ("https://example.com/a?b=c", ("example.com", "https://a b", "")),
    "uri-reference": ("/a/b", ("a b", "a%zz")),
    "iri": ("https://example.com/a", ("example.com", "https://a b")),
    "iri-reference": ("/a/b", ("a b",)),
    "uri-template": ("/a/{b}", ("/a/{b", "/a/}")),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", ("123e4567", "123e4567-e89b-12d3-a456-42661417400g")),
    "json-pointer": ("/a/b", ("a/b", "/~2")),
    "relative-json-pointer": ("1/a", ("/a", "01/a")),
    "regex": ("a+b", ("a(b", "[a")),
}

#: (feature, expression, the same expression for Python's re, valid texts, invalid texts)
_REGEXES: Final[tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("literals", "ab", "ab", ("ab",), ("a", "abc", "")),
    ("alternation", "ab|c|", "ab|c|", ("ab", "c", ""), ("b", "abc")),
    ("any character", "a.c", "a.c", ("abc", "aéc"), ("ac", "a\nc")),
    ("escapes", r"\.\*\n\t\x41\u00e9", r"\.\*\n\t\x41\u00e9", (".*\n\tAé",), ("a*\n\tAé",)),
    ("control escapes", r"\cJ", r"\n", ("\n",), ("cJ",)),
    ("code points beyond 16 bits", r"\u{1F600}", "\U0001f600", ("\U0001f600",), ("u",)),
    ("classes", "[a-cx]", "[a-cx]", ("b", "x"), ("d", "")),
    ("negated classes", "[^a-c]", "[^a-c]", ("d", "é"), ("a", "dd")),
    (r"\d, \D", r"\d\D", r"\d\D", ("1a",), ("a1", "11", "\u0663a")),
    (r"\w, \W", r"\w\W", r"\w\W", ("_-",), ("--", "__", "é-")),
    (r"\s, \S", r"a\s\S", r"a(?u:\s|\ufeff)(?u:\S)", ("a b",), ("ab", "a  ")),
    ("classes in classes", r"[\d\-x]+", r"[\d\-x]+", ("1-x",), ("y",)),
    ("Unicode properties", r"\p{L}+", r"(?u:[^\W\d_]+)", ("aé",), ("1", "p-")),
    ("? * +", "a?b*c+", "a?b*c+", ("c", "abbcc"), ("ab", "aac")),
    ("{m}", "a{3}", "a{3}", ("aaa",), ("aa", "aaaa")),
    ("{m,}", "a{2,}", "a{2,}", ("aa", "aaaa"), ("a",)),
    ("{m,n}", "(ab){1,2}", "(ab){1,2}", ("ab", "abab"), ("", "ababab")),
    ("lazy quantifiers", "a+?b*?c??", "a+?b*?c??", ("a", "aabbc"), ("b", "acc")),
    ("groups", "(a|b)(?:c|d)", "(a|b)(?:c|d)", ("ac", "bd"), ("ab", "acd")),
    ("named groups", "(?<x>ab)", "(?P<x>ab)", ("ab",), ("a", "xab")),
    ("anchors around", "^ab$", "ab", ("ab",), ("^ab$", "a")),
    ("anchors around branches", "^a$|^b$", "a|b", ("a", "b"), ("ab", "a^b")),
    ("anchors inside", "a(^b|$)", "a", ("a",), ("ab", "a$")),
    ("word boundaries", r"a\b.", r"a\b.", ("a ",), ("ab",)),
    (r"\B", r"a\B.", r"a\B.", ("ab",), ("a ",)),
    ("lookahead", "(?=ab)a.", "(?=ab)a.", ("ab",), ("ac",)),
    ("negative lookahead", "(?!ab)a.", "(?!ab)a.", ("ac",), ("ab",)),
    ("lookbehind", "a.(?<=b)", "a.(?<=b)", ("ab",), ("ac",)),
    ("negative lookbehind", "a.(?<!b)", "a.(?<!b)", ("ac",), ("ab",)),
    ("backreferences", r"(a|b)\1", r"(a|b)\1", ("aa", "bb"), ("ab", "a1")),
    ("named backreferences", r"(?<x>a|b)\k<x>", r"(?P<x>a|b)(?P=x)", ("aa",), ("ab",)),
    ("flags", "(?i:ab)", "(?i:ab)", ("aB",), ("ac",)),
)


def _is_balanced(text: str) -> bool:
    while "()" in text:
        text = text.replace("()", "")
    return not text


#: (feature, grammar, judge, valid texts, invalid texts)
_EBNFS: Final[tuple[tuple[str, str, Judge, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("literals", 'root ::= "ab" "c"', regex_judge("abc"), ("abc",), ("ab", "abcc")),
    ("escapes", r'root ::= "\"\\\n\x41\u00e9"', regex_judge('"\\\\\nA\u00e9'), ('"\\\nAé',), ('"',)),
    ("empty text", 'root ::= "a" | ""', regex_judge("a?"), ("", "a"), ("aa",)),
    ("alternatives", 'root ::= "a" | "b" "c"', regex_judge("a|bc"), ("a", "bc"), ("ac", "b")),
    ("groups", 'root ::= ("a" | "b") "c"', regex_judge("[ab]c"), ("ac", "bc"), ("a", "abc")),
    ("classes", r"root ::= [a-c\]\-]", regex_judge(r"[a-c\]\-]"), ("b", "]", "-"), ("d", "bb")),
    ("negated classes", "root ::= [^a-c]", regex_judge("[^a-c]"), ("d", "é", "\n"), ("a", "")),
    ("any character", 'root ::= "a" .', regex_judge("(?s:a.)"), ("ab",), ("a", "abc")),
    ("? * +", 'root ::= "a"? "b"* "c"+', regex_judge("a?b*c+"), ("c", "abbcc"), ("ab", "aac")),
    ("{m}", 'root ::= "a"{3}', regex_judge("a{3}"), ("aaa",), ("aa", "aaaa")),
    ("{m,}", 'root ::= [ab]{2,}', regex_judge("[ab]{2,}"), ("ab", "abab"), ("a",)),
    ("{m,n}", 'root ::= ("ab"){1,2}', regex_judge("(ab){1,2}"), ("ab", "abab"), ("", "ababab")),
    ("rules", 'root ::= a b\na ::= "a"\nb ::= "b"', regex_judge("ab"), ("ab",), ("a", "ba")),
    ("rules over lines", 'root ::= "a" |\n  "b"', regex_judge("[ab]"), ("a", "b"), ("ab",)),
    ("comments", 'root ::= "a" # "b"\n# "c"', regex_judge("a"), ("a",), ("ab", "c")),
    ("right recursion", 'root ::= "a" root | "b"', regex_judge("a*b"), ("b", "aab"), ("a", "ba")),
    ("left recursion", 'root ::= root "a" | "b"', regex_judge("ba*"), ("b", "baa"), ("a", "ab")),
    ("nested recursion", 'root ::= ("(" root ")")*', _is_balanced, ("", "(())()"), ("(", "())")),
)  # fmt: skip

_CHOICES: Final[tuple[tuple[str, list[str], tuple[str, ...]], ...]] = (
    ("texts", ["red", "green"], ("blue", "", "redgreen")),
    ("one the start of another", ["ab", "abc", "b"], ("a", "abcb")),
    ("quotes, line ends, any characters", ['"a"\\', "b\n", "é\U0001f600", "^.*$"], ("a", "b", "é")),
)

_COUNT_TAG: Final[Mapping[str, Any]] = {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}
_WORD_TAG: Final[Mapping[str, Any]] = {"begin": "[w]", "regex": "[a-c]+", "end": "[/w]"}

_TAGS: Final[tuple[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]], ...]] = (
    ("schema", {"triggers": ["<n>"], "structures": [_COUNT_TAG]}, ("a <n>12</n> b", ""), ("<n>a</n>", "<n>1")),
    ("regex", {"triggers": ["[w]"], "structures": [_WORD_TAG]}, ("a[w]abc[/w]",), ("[w]xyz[/w]", "[w]a")),
    (
        "several triggers",
        {"triggers": ["<n>", "[w]"], "structures": [_COUNT_TAG, _WORD_TAG]},
        ("<n>1</n>[w]a[/w] c",),
        ("<n>a</n>", "[w]1[/w]"),
    ),
    (
        "several structures of a trigger",
        {"triggers": ["<t:"], "structures": [{**_COUNT_TAG, "begin": "<t:n>"}, {**_WORD_TAG, "begin": "<t:w>"}]},
        ("<t:n>1</n> <t:w>b[/w]",),
        ("<t:n>b</n>", "<t:x>1</n>"),
    ),
    (
        "at_least_one",
        {"triggers": ["<n>"], "structures": [_COUNT_TAG], "at_least_one": True},
        ("<n>1</n>", "<n>1</n> a"),
        ("", "a", "a<n>1</n>"),
    ),
    (
        "stop_after_first",
        {"triggers": ["<n>"], "structures": [_COUNT_TAG], "stop_after_first": True},
        ("a <n>1</n>",),
        ("<n>1</n> a", "<n>1</n><n>2</n>"),
    ),
    (
        "both flags",
        {"triggers": ["<n>"], "structures": [_COUNT_TAG], "at_least_one": True, "stop_after_first": True},
        ("<n>1</n>",),
        ("", "a", "a<n>1</n>", "<n>1</n>b"),
    ),
)


def cases() -> Iterator[Case]:
    """Yield all cases, section by section."""
    json_kind, regex_kind = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX
    for section, rows in _SCHEMAS.items():
        for feature, schema, valid, invalid in rows:
            spec = json.dumps(schema, ensure_ascii=False)
            yield Case(f"JSON Schema: {section}", feature, json_kind, spec, valid, invalid, schema_judge(schema))
    for name, (good, bad) in _FORMATS.items():
        schema = {"type": "string", "format": name}
        texts = tuple(json.dumps(text) for text in bad)
        spec, valid = json.dumps(schema), (json.dumps(good),)
        yield Case("JSON Schema: Formats", "format", json_kind, spec, valid, texts, schema_judge(schema))
    for feature, regex, meaning, valid, invalid in _REGEXES:
        yield Case("Regular expressions", feature, regex_kind, regex, valid, invalid, regex_judge(meaning))
    for feature, ebnf, judge, valid, invalid in _EBNFS:
        yield Case("EBNF", feature, GrammarKind.EBNF, ebnf, valid, invalid, judge)
    for feature, choices, invalid in _CHOICES:
        spec = json.dumps(choices)
        yield Case("Choices", feature, GrammarKind.CHOICE, spec, tuple(choices), invalid, choice_judge(choices))
    for feature, tag, valid, invalid in _TAGS:
        yield Case(
            "Structural tags", feature, GrammarKind.STRUCTURAL_TAG, json.dumps(tag), valid, invalid, tag_judge(tag)
        )
