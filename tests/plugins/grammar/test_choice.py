"""Choices: parsing, refusals and accepted texts."""

import json

import pytest

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.errors import GrammarError
from graftlm_grammar.choice import choices_to_ebnf, parse_choices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "choice: not JSON: "),
        ("[" * 100_000, "choice: not JSON: "),
        ('"a"', 'choice: expected a non-empty list of strings, got "a"'),
        ('{"a": 1}', 'choice: expected a non-empty list of strings, got {"a": 1}'),
        ("[]", "choice: expected a non-empty list of strings, got []"),
        ('["a", 1]', "choice: $[1]: expected a string, got 1"),
        ('["a", "b", ["c"]]', 'choice: $[2]: expected a string, got ["c"]'),
        ("[null]", "choice: $[0]: expected a string, got null"),
        (r'["a", "b\ud800"]', "choice: $[1]: an unpaired surrogate is not text"),
    ],
)
def test_malformed_choices_are_refused_with_their_path(byte_backend, text, said):
    with pytest.raises(GrammarError) as caught:
        parse_choices(text)
    assert str(caught.value).startswith(said)
    for method in (byte_backend.check, byte_backend.compile):
        with pytest.raises(GrammarError) as caught:
            method(GrammarSpec(GrammarKind.CHOICE, text))
        assert str(caught.value).startswith(said)


def test_ten_thousand_choices_are_accepted_and_more_are_refused():
    texts = [str(i) for i in range(10_001)]
    assert len(parse_choices(json.dumps(texts[:-1]))) == 10_000
    with pytest.raises(GrammarError, match=r"^choice: got 10001 choices, expected at most 10000$"):
        parse_choices(json.dumps(texts))


def test_duplicate_choices_are_dropped_and_the_order_is_kept():
    assert parse_choices('["b", "a", "b", "", "a"]') == ("b", "a", "")


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        ["a", "ab", "abc", "b"],
        ["", "a"],
        ['"', "\\", "\\n", "\n", "\t\r", "\x00\x1f\x7f"],
        ["ß", "日本", "\U0001f600", "e\u0301"],
        ["[a-z]", "(a|b)*", "root", "::=", "# a", "{2}"],
    ],
    ids=["plain", "one the start of another", "empty", "quotes and controls", "beyond ASCII", "notation"],
)
def test_only_the_choices_are_accepted(texts, choices):
    others = [one + "a" for one in choices if one + "a" not in choices] + [one[:-1] for one in choices if one]
    others = [one for one in others if one not in choices]
    assert texts.accepted("choice", json.dumps(choices), choices + others) == choices


def test_choices_are_escaped_for_ebnf():
    assert choices_to_ebnf(['a"\\', "\n"]) == r'root ::= "a\u0022\u005c" | "\u000a"'
