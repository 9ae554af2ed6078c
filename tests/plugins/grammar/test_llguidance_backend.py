"""The `llguidance` backend keeps its contract, and its own code on top of the library is right."""

import itertools
import json
import random
import re

import jsonschema
import numpy as np
import pytest

import graftlm_grammar
from graftlm.contracts import API_VERSION, GrammarContext, GrammarKind, GrammarSpec, Platform
from graftlm.errors import GrammarError
from graftlm.testing import GrammarBackendConformance
from graftlm_grammar.llguidance_backend import LLGuidanceBackend
from graftlm_grammar.options import LLGuidanceOptions

PROVIDER = next(one for one in graftlm_grammar.provide_grammar_backends() if one.name == "llguidance")
END = 256


class TestLLGuidance(GrammarBackendConformance):
    def create(self, context: GrammarContext):
        return PROVIDER.create(PROVIDER.options(), context)


@pytest.fixture(scope="module")
def llg(texts_of, byte_context):
    return texts_of(LLGuidanceBackend(LLGuidanceOptions(), byte_context))


@pytest.fixture(scope="module")
def compact(texts_of, byte_context):
    return texts_of(LLGuidanceBackend(LLGuidanceOptions(whitespace="compact"), byte_context))


def test_the_provider_is_available_if_the_library_is_installed():
    assert PROVIDER.api_version == API_VERSION
    assert PROVIDER.unavailable(Platform()) is None


def test_auto_still_selects_xgrammar():
    best = max(graftlm_grammar.provide_grammar_backends(), key=lambda provider: provider.rank)
    assert best.name == "xgrammar"


# -- JSON schemas ------------------------------------------------------------------------------------------------------


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
NAMED_AS_KEYWORDS = {"type": "object", "properties": {"$ref": {"type": "null"}, "enum": {"$ref": "#"}}}
ENDLESS = NODE | {"required": ["next"]}


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6", '"a"']),
        ({"allOf": [{"pattern": "a.*"}, {"pattern": ".*b"}], "type": "string"}, ['"ab"', '"axb"'], ['"a"', '"b"']),
        ({"type": "string", "pattern": "[ab]+", "minLength": 2, "maxLength": 3}, ['"ab"'], ['"a"', '"abab"', '"cc"']),
        ({"type": "string", "format": "date", "pattern": "2024.*"}, ['"2024-02-29"'], ['"2025-01-01"', '"2024-02-30"']),
        ({"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 10}, ["6", "9"], ["3", "7", "12"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 4}, ["4", "null"], ["3"]),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, ["4", "null"], ["4.5"]),
        ({"$ref": "#/$defs/i", "minimum": 4, "$defs": {"i": {"type": "integer"}}}, ["4"], ["3", '"a"']),
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, ['{"next":{"next":{}}}'], ['{"next":1}', '{"other":1}']),
        ({"enum": ["ab", "c", 1], "type": "string", "maxLength": 1}, ['"c"'], ['"ab"', "1"]),
        ({"const": {"a": [1, None]}}, ['{"a":[1,null]}'], ['{"a":[1]}']),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "required": ["ab"]},
            ['{"ab":1}', '{"ab":1,"a":2}'],
            ['{"ab":"x"}', "{}", '{"ab":1,"b":2}'],
        ),
        (
            {"properties": {"ab": {"type": "integer"}}, "patternProperties": {"b": {"minimum": 3}}, "type": "object"},
            ['{"ab":3}', '{"xbx":3}'],
            ['{"ab":2}', '{"xbx":2}'],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
            ['{"a":1,"b":"x"}'],
            ['{"a":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":"x"}'],
        ),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"c":2}']),
        ({"type": "object", "minProperties": 1, "maxProperties": 1}, ['{"a":1}'], ["{}", '{"a":1,"b":2}']),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"const": 1}}, ["[null,1,1]"], ["[1]"]),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, ["[true]"], ["[]", "[1]"]),
        ({"type": "string", "maxLength": 1}, ['"é"', '"\\n"'], ['"ab"', '"\\u00e9"']),
        ({"minimum": 3}, ["3", '"a"'], ["2"]),
        (True, ["1", "{}"], [""]),
        (NAMED_AS_KEYWORDS, ['{"enum":{}}'], ['{"$ref":1}']),
        # A branch without a finite text is never taken.
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}], "$defs": {"n": ENDLESS}}, ["null"], ["{"]),
    ],
)  # fmt: skip
def test_several_keywords_are_enforced_together(llg, schema, accepted, rejected):
    assert llg.accepted_by_schema(schema, [*accepted, *rejected]) == accepted


def in_object(schema):
    return {"type": "object", "properties": {"a": schema}}


UNENFORCED = [
    ({"type": "array", "uniqueItems": True}, "$.uniqueItems"),
    (in_object({"uniqueItems": True}), "$.properties.a.uniqueItems"),
    ({"not": {"type": "string"}}, "$.not"),
    ({"if": {"type": "string"}}, "$.if"),
    ({"then": {"type": "string"}}, "$.then"),
    ({"else": {"type": "string"}}, "$.else"),
    ({"type": "array", "contains": {"const": 1}}, "$.contains"),
    ({"type": "array", "minContains": 1}, "$.minContains"),
    ({"type": "array", "maxContains": 1}, "$.maxContains"),
    ({"type": "array", "unevaluatedItems": False}, "$.unevaluatedItems"),
    ({"type": "array", "additionalItems": False}, "$.additionalItems"),
    ({"type": "object", "unevaluatedProperties": False}, "$.unevaluatedProperties"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "$.propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "$.dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "$.dependentSchemas"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "$.dependencies"),
    ({"type": "object", "minProperties": 2}, "$.minProperties"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, "$.maxProperties"),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "$.patternProperties"),
    ({"type": "string", "format": "hostname"}, "$.format"),
    ({"type": "string", "format": "regex"}, "$.format"),
    ({"type": "string", "pattern": "(?=a)b"}, "$.pattern"),
    ({"type": "number", "multipleOf": 0.01}, "$.multipleOf"),
    ({"type": "number", "exclusiveMinimum": 42, "maximum": 42.25}, "$"),
    ({"minimum": -2.5, "exclusiveMaximum": -2.0}, "$"),
    ({"allOf": [{"exclusiveMinimum": 0}, {"exclusiveMaximum": 0.5}]}, "$.allOf[1]"),
    ({"type": "integer", "multipleOf": 5000}, "$.multipleOf"),
    ({"type": "integer", "allOf": [{"multipleOf": 4093}, {"multipleOf": 4091}]}, "$.allOf[1].multipleOf"),
    ({"type": "number", "maximum": 1e300}, "$.maximum"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf"),
    ({"$ref": "https://example.com/schema"}, "$.$ref"),
    ({"$dynamicRef": "#a"}, "$.$dynamicRef"),
    ({"$id": "a", "items": {"$id": "b"}}, "$.items.$id"),
    ({"const": "\u0001"}, "$.const"),
    ({"const": "a\u007f"}, "$.const"),
    ({"enum": ["\u007f", "a"]}, "$.enum"),
    ({"someday": 1}, "$.someday"),
    (
        {"type": "object", "properties": {"a": {"$ref": "#", "minProperties": 1}}},
        "$.properties.a.$ref",
    ),
]


@pytest.mark.parametrize(("schema", "path"), UNENFORCED)
def test_an_unenforceable_keyword_is_refused_or_ignored_by_its_path(llg, schema, path):
    text = json.dumps(schema)
    for method in (llg.backend.check, llg.backend.compile):
        with pytest.raises(GrammarError, match=re.escape(f"json_schema: {path}: ")):
            method(GrammarSpec(GrammarKind.JSON_SCHEMA, text))
    lenient = GrammarSpec(GrammarKind.JSON_SCHEMA, text, strict=False)
    assert llg.backend.check(lenient) == (path,)
    assert not llg.backend.compile(lenient).matcher().finished


@pytest.mark.parametrize(
    ("schema", "unenforced", "accepted", "rejected"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["$.oneOf"], ["1", "1.5"], ['"a"']),
        ({"oneOf": [{"minimum": 1}, {"$ref": "http://x.org/y"}], "type": "null"}, None, ["null"], ["1"]),
        ({"allOf": [{"not": {}}, {"type": "integer"}, {"minimum": 3}]}, ["$.allOf[0].not"], ["4"], ["2", '"a"']),
        ({"allOf": [{"type": "integer", "$ref": "http://x.org/y"}]}, ["$.allOf[0].$ref"], ["4"], ['"a"']),
    ],
)
def test_a_lenient_schema_ignores_only_the_unenforceable_keywords(llg, schema, unenforced, accepted, rejected):
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict=False)
    assert unenforced is None or llg.backend.check(spec) == tuple(unenforced)
    assert llg.accepted_by_spec(spec, [*accepted, *rejected]) == accepted


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "text"}, r"\$\.type: expected one or more of"),
        ({"type": "array", "minItems": -1}, r"\$\.minItems: expected a whole number"),
        ({"type": "array", "items": [{}]}, r"\$\.items: expected one schema, got a list; write prefixItems"),
        ({"properties": []}, r"\$\.properties: expected an object"),
        ({"required": "a"}, r"\$\.required: expected a list of names"),
        ({"anyOf": []}, r"\$\.anyOf: expected a non-empty list"),
        ({"enum": []}, r"\$\.enum: expected a non-empty list"),
        ({"minimum": "3"}, r"\$\.minimum: expected a number"),
        ({"type": "string", "pattern": "("}, r"\$\.pattern: regular expression"),
        ({"$ref": "#/$defs/a"}, r"\$\.\$ref: the target of #/\$defs/a does not exist"),
        ({"uniqueItems": 3}, r"\$\.uniqueItems"),
        ({"not": 3}, r"\$\.not"),
        ({"properties": {f"a{i}": {} for i in range(401)}}, r"\$\.properties: 401 properties are optional"),
        (False, "no finite value is valid"),
        ({"type": "string", "enum": [1]}, "no value is valid: incompatible types"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "#/$defs/n", "$defs": {"n": ENDLESS}}, "its recursion never ends"),
        ({"allOf": [{"anyOf": [{"properties": {f"{x}{i}": {}}} for x in "ab"]} for i in range(18)]}, "too large"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_malformed_schemas_and_those_without_a_value_are_refused_even_if_lenient(llg, schema, said, strict):
    for method in (llg.backend.check, llg.backend.compile):
        with pytest.raises(GrammarError, match=f"json_schema: .*{said}"):
            method(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict))


@pytest.mark.parametrize(
    ("whitespace", "accepted"),
    [
        ("compact", ['{"a":[1,2]}']),
        ("spaced", ['{"a": [1, 2]}']),
        ("flexible", ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n "a" :[1\n  ,2]}']),
    ],
)
def test_whitespace_follows_the_options(texts_of, byte_context, whitespace, accepted):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    backend = LLGuidanceBackend(LLGuidanceOptions(whitespace=whitespace, max_whitespace=3), byte_context)
    texts = ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n "a" :[1\n  ,2]}', '{"a":    [1]}', ' {"a":[]}', '{"a":[]} ']
    assert texts_of(backend).accepted_by_schema(schema, texts) == accepted


# -- random walks ------------------------------------------------------------------------------------------------------


def allowed(matcher):
    mask = np.zeros((1, 9), dtype=np.int32)
    matcher.fill_bitmask(mask, 0)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(matcher, draw, num_free=12, limit=400):
    """Return a text of a random walk under the masks, ended as soon as possible after some tokens; None if it gets
    too long.
    """
    output = bytearray()
    for num in range(limit):
        token_ids = allowed(matcher)
        closing = [token_id for token_id in token_ids if token_id in (END, *b'"}]>')]
        token_id = draw.choice(closing if closing and num > num_free else token_ids)
        assert matcher.accept(token_id)
        if token_id == END:
            return output.decode()
        output.append(token_id)
    return None


def go_along(matcher, text):
    for byte in text.encode():
        assert byte in allowed(matcher)
        assert matcher.accept(byte)


def some_schema(draw, depth=0):
    """Return a random schema, mostly with combined keywords."""
    name = draw.choice(["object", "array", "string", "integer", "number", "null"])
    if depth > 2:
        return {"type": draw.choice(["string", "integer", "boolean"])}

    def some(**keywords):
        return {key: make() for key, make in keywords.items() if draw.random() < 0.4}

    schema = {"type": name} | {
        "object": lambda: some(
            properties=lambda: {key: some_schema(draw, depth + 1) for key in draw.sample(["a", "b", 'c"'], 2)},
            required=lambda: draw.sample(["a", "b"], 1),
            additionalProperties=lambda: some_schema(draw, depth + 1),
            patternProperties=lambda: {"^x": some_schema(draw, depth + 1)},
            minProperties=lambda: 1,
        ),
        "array": lambda: some(
            items=lambda: some_schema(draw, depth + 1),
            prefixItems=lambda: [some_schema(draw, depth + 1)],
            minItems=lambda: draw.randint(0, 2),
            maxItems=lambda: draw.randint(2, 4),
        ),
        "string": lambda: some(
            pattern=lambda: draw.choice(["a+b?", "[a-c]{2,4}", "[^a]*"]),
            minLength=lambda: draw.randint(0, 2),
            maxLength=lambda: draw.randint(2, 5),
            format=lambda: draw.choice(["date", "uuid", "email", "ipv4", "duration"]),
        ),
    }.get(name, lambda: some(minimum=lambda: -2.5, maximum=lambda: 12, multipleOf=lambda: draw.choice([2, 3])))()
    if draw.random() < 0.3:
        schema["allOf"] = [some_schema(draw, depth + 1) | {"type": name}, {"type": [name, "null"]}]
    if draw.random() < 0.2:
        schema["anyOf"] = [{"type": name}, some_schema(draw, depth + 1)]
    return schema


def test_every_text_under_the_masks_is_valid(compact):
    draw, num_valid = random.Random(5), 0
    for _ in range(150):
        schema = some_schema(draw)
        try:
            compiled = compact.backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        except GrammarError:
            continue
        judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        for _ in range(3):
            text = walk(compiled.matcher(), draw)
            if text is not None:
                judge.validate(json.loads(text))
                num_valid += 1
    assert num_valid > 150


REGEXES = [r"(ab|a)*c{2,3}", r"\d{3}-\w+", "[^a]{1,4}", "a|bc|", "(?:x|yy){2}[-.]", "é+[à-ü]?", r"\x41\u0042\/"]


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regular_expression_must_match_the_whole_text(llg, regex):
    draw = random.Random(7)
    compiled = llg.backend.compile(GrammarSpec(GrammarKind.REGEX, regex))
    for _ in range(20):
        text = walk(compiled.matcher(), draw)
        assert text is None or re.fullmatch(regex, text)


@pytest.mark.parametrize("regex", ["(?=a)b", r"a\b", r"(a)\1", "(a{1,500}){1,500}", "a^b", "(?i)a", r"\p{L}"])
def test_unsupported_regular_expressions_are_refused(llg, regex):
    with pytest.raises(GrammarError, match="regular expression"):
        llg.backend.check(GrammarSpec(GrammarKind.REGEX, regex))


# -- EBNF --------------------------------------------------------------------------------------------------------------

EBNF = [
    'root ::= [a-b]* "b"',  # the longest match of [a-b]* leaves nothing
    'root ::= "a" root "b" | "a" | ""',
    'root ::= "a" "bc" root | "ab" "b" | "c"',
    'root ::= root root | "ab" | "a"',
    'root ::= x{1,2} | "(" root ")"\nx ::= "a" | "ab"',
    'root ::= ("ab" | "a" root)? [b-c]',
    'root ::= a+ root? "c"\na ::= "" | "b" a # nothing, or more',
]


@pytest.mark.parametrize("ebnf", EBNF)
def test_a_grammar_accepts_the_same_language_as_with_xgrammar(llg, texts, ebnf):
    some = ["".join(letters) for length in range(5) for letters in itertools.product("abc", repeat=length)]
    assert llg.accepted("ebnf", ebnf, some) == texts.accepted("ebnf", ebnf, some)


def test_branches_without_a_finite_text_are_never_taken(llg):
    ebnf = 'root ::= "a" | endless\nendless ::= "b" endless\nunused ::= (unused){2}'
    assert llg.accepted("ebnf", ebnf, ["a", "b"]) == ["a"]
    assert allowed(llg.matcher("ebnf", ebnf)) == [ord("a")]


@pytest.mark.parametrize(
    ("ebnf", "said"),
    [
        ("root ::= b", 'ebnf: .*Rule "b" is not defined'),
        ('start ::= "a"', "ebnf: expected a rule named root"),
        ('root ::= "a" {1001}', "ebnf: line 1: .*1000 repetitions"),
        ('root ::= "a" root', "ebnf: no finite text matches root"),
        ('root ::= "a"\nroot ::= "b"', "ebnf: line 2: rule root is defined twice"),
        ('root ::= ("a"', r"ebnf: line 1: a \) is missing"),
        ('root ::= "a', 'ebnf: line 1: a " is missing'),
        ("root ::= [b-a]", "ebnf: line 1: a range must go"),
        ('root ::= "a" |', "ebnf: line 1: expected an expression"),
        ('root ::= (= "a") "a"', "ebnf: line 1: lookaheads"),
        ('root ::= TagDispatch(("a", b))', "ebnf: line 1: .*TagDispatch"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "ebnf: line 1: nested"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30 ::= "a"', "too long"),
        ("\ud800", "ebnf: not text"),
    ],
)
def test_a_malformed_grammar_is_refused_with_its_line(llg, ebnf, said):
    for method in (llg.backend.check, llg.backend.compile):
        with pytest.raises(GrammarError, match=said):
            method(GrammarSpec(GrammarKind.EBNF, ebnf))


# -- structural tags ---------------------------------------------------------------------------------------------------

TWO = {
    "triggers": ["<f=", "[["],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object", "properties": {"x": {"type": "string"}}}, "end": "</f>"},
        {"begin": "<f=ab>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "[[", "regex": "[a-z\\]]*", "end": "]]"},
    ],
}


@pytest.mark.parametrize(
    ("flags", "accepted", "rejected"),
    [
        (
            {},
            ["", "hi", "<f", "a<f=a>{}</f>", "<f=ab>12</f> <f=ab>3</f>[[]]", '<f=a>{"x":"<f="}</f>[', "[<<f=ab>1</f>é"],
            ["<f=", "<f=c", "<f=a>{}", "<f=ab>{}</f>", "[[a", "x[[1]]", "<f=a>{}</f><f="],
        ),
        ({"at_least_one": True}, ["<f=a>{}</f>", "[[a]]x<f=ab>1</f>"], ["", "x", "x[[a]]"]),
        ({"stop_after_first": True}, ["", "x", "x[[a]]", "<f=ab>1</f>"], ["[[a]]x", "[[a]][[a]]"]),
        ({"at_least_one": True, "stop_after_first": True}, ["[[a]]", "<f=a>{}</f>"], ["", "x[[a]]", "[[a]]x"]),
    ],
)
def test_free_text_continues_as_a_structure_after_a_trigger(compact, flags, accepted, rejected):
    assert compact.accepted("structural_tag", json.dumps(TWO | flags), [*accepted, *rejected]) == accepted


def test_the_begin_of_a_structure_may_start_another_begin(compact):
    tag = {
        "triggers": ["<"],
        "structures": [
            {"begin": "<", "schema": {"type": "object", "required": ["a"]}, "end": ">"},
            {"begin": "<{", "regex": "b+", "end": ">"},
        ],
    }
    texts = ['<{"a":1}>', "<{bb>"]
    assert compact.accepted("structural_tag", json.dumps(tag), [*texts, "<{}>", "<b>"]) == texts


def test_a_trigger_without_a_structure_is_never_generated(compact):
    tag = {"triggers": ["<<", "ab"], "structures": [{"begin": "<<", "regex": "x", "end": ""}]}
    assert compact.accepted("structural_tag", json.dumps(tag), ["a", "ab", "<<x", "<<xab"]) == ["a", "<<x"]


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        ({"schema": {"not": {}}}, r"structural_tag: \$\.structures\[0\]\.schema\.not: "),
        (
            {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}},
            r"\$\.structures\[0\]\.schema\.\$defs\.a\.not",
        ),
        ({"regex": "("}, r"structural_tag: \$\.structures\[0\]\.regex: "),
    ],
)
def test_an_unsupported_structure_is_refused_by_its_path(llg, structure, said):
    tag = {"triggers": ["<"], "structures": [{"begin": "<", "end": ">", **structure}]}
    with pytest.raises(GrammarError, match=said):
        llg.backend.check(GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))


def test_a_lenient_structure_reports_ignored_keywords(llg):
    tag = {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"items": {"not": {}}}, "end": ">"}]}
    spec = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), strict=False)
    assert llg.backend.check(spec) == ("$.structures[0].schema.items.not",)


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_forced_text_ends_with_a_whole_character(llg):
    matcher = llg.matcher("ebnf", 'root ::= "ab" ("é" | "è")')
    assert matcher.forced_text() == "ab"
    assert list(matcher.forced_tokens()) == [*b"ab", 0xC3]


def test_nothing_is_forced_where_the_text_may_end(llg):
    matcher = llg.matcher("regex", "a(bc)?")
    assert matcher.accept(ord("a"))
    assert (matcher.forced_text(), list(matcher.forced_tokens())) == ("", [])


def test_every_stop_token_is_allowed_only_after_a_complete_text(byte_context):
    backend = LLGuidanceBackend(LLGuidanceOptions(), GrammarContext(byte_context.tokenizer_json, 280, (END, 270, 999)))
    matcher = backend.compile(GrammarSpec(GrammarKind.REGEX, "ab?")).matcher()
    assert allowed(matcher) == [ord("a")]
    assert matcher.accept(ord("a"))
    assert allowed(matcher) == [ord("b"), END, 270]
    for stop_token_id in (END, 270):
        assert matcher.accept(stop_token_id)
        assert matcher.finished
        assert allowed(matcher) == []
        matcher.rollback(1)
    assert not matcher.accept(999)
    assert allowed(matcher) == [ord("b"), END, 270]


def test_a_vocabulary_without_a_stop_token_is_refused(byte_context):
    with pytest.raises(GrammarError, match="expected a stop token below the vocabulary's size, 100"):
        LLGuidanceBackend(LLGuidanceOptions(), GrammarContext(byte_context.tokenizer_json, 100, (END,)))


def test_a_text_outside_the_vocabulary_is_refused(byte_context):
    backend = LLGuidanceBackend(LLGuidanceOptions(), GrammarContext(byte_context.tokenizer_json, 100, (50,)))
    with pytest.raises(GrammarError, match="regex: no tokens of the vocabulary form"):
        backend.compile(GrammarSpec(GrammarKind.REGEX, "z"))


def test_a_text_with_too_many_parses_fails_with_a_grammar_error(llg):
    matcher = llg.matcher("ebnf", 'root ::= (("(" root ")" | "x"){1,1000}){1,1000}')
    with pytest.raises(GrammarError, match="llguidance: "):
        go_along(matcher, "x" * 200)


def test_a_grammar_with_only_long_texts_is_refused(byte_context):
    backend = LLGuidanceBackend(LLGuidanceOptions(), byte_context)
    text = f'root ::= {"a " * 17}\na ::= "b"{{1000}}'
    with pytest.raises(GrammarError, match="its shortest text has more than 16384 characters"):
        backend.check(GrammarSpec(GrammarKind.EBNF, text))
    backend.check(GrammarSpec(GrammarKind.EBNF, text.replace("a " * 17, "a " * 16)))
