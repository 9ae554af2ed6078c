"""Lark grammars: the same texts as with lark's own parser, both backends, and an error for each unsupported part."""

import itertools
import random
import time

import lark
import pytest

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.errors import GrammarError
from graftlm_grammar.ebnf import read_ebnf
from graftlm_grammar.lark_ebnf import as_ebnf
from graftlm_grammar.llguidance_backend import LLGuidanceBackend
from graftlm_grammar.options import LLGuidanceOptions

ARITHMETIC = r"""
?start: sum
?sum: product | sum "+" product -> add | sum "-" product -> sub
?product: atom | product "*" atom -> mul
?atom: NUMBER -> number
     | "-" atom
     | "(" sum ")"
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
JSON = r"""
// comments of both kinds
?start: value
?value: object | array | ESCAPED_STRING -> string | SIGNED_NUMBER | "true" | "false" | "null"  # the values
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: ESCAPED_STRING ":" value
%import common (ESCAPED_STRING, SIGNED_NUMBER, WS)
%ignore WS
"""
TERMINALS = r"""
start.2: ("a".."c" ~ 2..3 | HEX~2 | /x[yz]+?\/"/i | "Set"i _sep root | "\\\"é\n")+
_sep: ":"?
root: KEY
KEY.5: "k" UPPER* | "\u00e9"
HEX: "0x" ("0".."9" | "a".."f")
UPPER: /[A-C]/
"""
GRAMMARS = {
    "arithmetic": (ARITHMETIC, ["1", "1 + 2.5*(3-4)", " -(1)", "1 +", "(1", "a", "1e5", "2 3", ""]),
    "json": (
        JSON,
        ['{"a": [1, -2.5e3, "\\"x\\\\"], "b":{}}', "[]", " null ", "[1,]", '{"a"}', '"\\"', '"a\nb"', "tru"],
    ),
    "terminals": (
        TERMINALS,
        ["ab", "abcaabc", "0x10xf", 'xYz/"', "sET:kAB", "Seté", '\\"é\n', "a", "0x1", "set", "xyz"],
    ),
}


@pytest.fixture(scope="module")
def llg(texts_of, byte_context):
    return texts_of(LLGuidanceBackend(LLGuidanceOptions(), byte_context))


def accepted_by_lark(grammar, texts):
    parser = lark.Lark(grammar, parser="earley", lexer="dynamic_complete")
    accepted = []
    for text in texts:
        try:
            parser.parse(text)
        except lark.exceptions.LarkError:
            continue
        accepted.append(text)
    return accepted


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_texts_as_with_lark_are_accepted(texts, llg, name):
    grammar, examples = GRAMMARS[name]
    rng = random.Random(name)
    good = accepted_by_lark(grammar, examples)
    assert good
    assert len(good) < len(examples)
    changed = []
    for _ in range(150):
        chars = list(rng.choice(good))
        at = rng.randrange(len(chars) + 1)
        chars[at : at + rng.randrange(3)] = rng.choices("".join(good), k=rng.randrange(3))
        changed.append("".join(chars))
    candidates = [*examples, *changed]
    expected = accepted_by_lark(grammar, candidates)
    assert 20 < len(expected) < len(candidates) - 20
    assert texts.accepted("ebnf", grammar, candidates) == expected
    assert llg.accepted("ebnf", grammar, candidates) == expected


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('begin: "a"', "rule named start, got begin"),
        ('start: "a', "Lark grammar, line 1, column 8"),
        ("start: missing", 'Rule "missing" is not defined'),
        ('start: "a"\nstart: "b"', "start is defined twice"),
        ('start: a{"x"}\na{y}: y', "templates are not supported"),
        ('a{y}: y\nstart: "x"', "templates are not supported"),
        ("%declare X\nstart: X", "%declare is not supported"),
        ('start: "a"\n%override start: "b"', "%override is not supported"),
        ("%import .files.X\nstart: X", "%import .files.X: expected a terminal of common or unicode"),
        ("%import python.NAME\nstart: NAME", "%import python.NAME: expected a terminal of common"),
        ("%import common.NOPE\nstart: NOPE", "%import common.NOPE: there is no such terminal"),
        ("%import common (INT, NOPE)\nstart: NOPE", "%import common.NOPE: there is no such terminal"),
        ("start: /a(?=b)/", "lookarounds"),
        ("start: /a.b/s", "the flag s is not supported"),
        (r'start: "\ud800"', "is not a character"),
        ('start: "z".."a"', "two characters in ascending order"),
        ('start: "ab".."c"', "two characters in ascending order"),
        ('start: "a" ~ 1..5000', "more than 1000 repetitions"),
        ("start: " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
        ("start: " + '"a" ' * 20_000, "got a Lark grammar of 80007 characters, expected at most 65536"),
        ("%import common.DIGIT\nstart: start DIGIT", "no finite text matches"),
    ],
)
def test_unsupported_grammars_are_refused(byte_backend, grammar, message):
    with pytest.raises(GrammarError) as error:
        byte_backend.compile(GrammarSpec(GrammarKind.EBNF, grammar))
    assert str(error.value).startswith("ebnf: ")
    assert message in str(error.value)


def test_ebnf_is_not_translated():
    for text in ('root ::= "a"', 'root ::= a\na ::= "start: x"', "", "hello"):
        assert as_ebnf(text) == text


@pytest.mark.timeout(60)
def test_the_translation_is_not_longer_than_its_grammar_suggests():
    doubling = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "a"\n'
    optional = "start: " + '"a"? ' * 3000 + "\n"
    for grammar in (doubling, optional, "%import common.SIGNED_FLOAT\nstart: " + "SIGNED_FLOAT " * 3000):
        text = as_ebnf(grammar)
        assert len(text) < 3 * len(grammar) + 2000
        assert read_ebnf(text)


def test_a_repeated_literal_is_translated_once():
    def cpu_s(literals):
        grammar = "start: " + "|".join(literals)
        begin = time.process_time()
        as_ebnf(grammar)
        return time.process_time() - begin

    as_ebnf('start: "a"')  # lark compiles its own grammar once
    distinct = [f"/{letters}[a-z]/i" for letters in map("".join, itertools.product("abcdefghij", repeat=3))]
    assert cpu_s(distinct[:1] * len(distinct)) < 0.5 * cpu_s(distinct)


def test_only_llguidance_accepts_its_own_format(byte_backend, llg):
    grammar = '%llguidance {}\n\nstart: WORD "-" %json {"type": "integer"}\nWORD: /[a-z]+/\n'
    assert llg.accepted("ebnf", grammar, ["ab-12", "ab-x", "-1"]) == ["ab-12"]
    with pytest.raises(GrammarError, match="only the backend llguidance accepts"):
        byte_backend.compile(GrammarSpec(GrammarKind.EBNF, grammar))
    with pytest.raises(GrammarError, match="expected a JSON object after %llguidance, got '1'"):
        llg.backend.compile(GrammarSpec(GrammarKind.EBNF, "%llguidance 1\nstart: /a/"))
