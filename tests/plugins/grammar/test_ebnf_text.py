"""Expressions are written so that they are parsed to the same expressions."""

import pytest

from graftlm_grammar.ebnf import read_ebnf
from graftlm_grammar.ebnf_text import ebnf_text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('root ::= "ab" "c"', 'root ::= ("ab") "c"'),
        ('root ::= ""', 'root ::= ""'),
        (r'root ::= "\"\\\n"', r'root ::= "\u0022\u005c\u000a"'),
        ("root ::= [a-c] [^b]", r"root ::= [a-c] [\u0000-ac-\ud7ff\ue000-\U0010ffff]"),
        ('root ::= "a" | b "c"\nb ::= ("d" | "e") "f"', 'root ::= [a] | b "c"\nb ::= ([d] | [e]) "f"'),
        ('root ::= "ab"* ("a" | "b")+ "a"? [x]{2} [x]{2,} [x]{2,3}', None),
        ('root ::= ("a"{2})? ([b]+)* "a"\n  *', "root ::= (([a]{2,2})?) (([b]+)*) ([a]*)"),
        ('root ::= ("a" ("b" | ("c" "")?) root)?', None),
    ],
)
def test_a_written_grammar_is_parsed_unchanged(text, written):
    rules = read_ebnf(text)
    assert written in (None, ebnf_text(rules))
    once = read_ebnf(ebnf_text(rules))
    assert ebnf_text(once) == ebnf_text(rules)
    assert once == rules
