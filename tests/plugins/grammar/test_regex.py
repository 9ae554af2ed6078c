"""Regular expressions as EBNF match the same texts as in Python, or are refused."""

import itertools
import random
import re

import pytest

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import IN_JSON_STRING
from graftlm_grammar.enforcement import NotEnforcedError
from graftlm_grammar.regex import regex_to_ebnf

WORDS = ["".join(letters) for length in range(6) for letters in itertools.product("abc", repeat=length)]


@pytest.mark.parametrize(
    ("regex", "accepted", "rejected"),
    [
        ("", [""], ["a"]),
        ("a|", ["a", ""], ["b"]),
        ("(|a)b", ["b", "ab"], ["a"]),
        ("^a|b$", ["a", "b"], ["^a", "b$"]),
        ("(ab+)?c", ["c", "abbc"], ["bc"]),
        (".", ["a", '"', "é", "😀"], ["\n", "\r", "ab"]),
        ("[\\s\\S]", ["\n", "a", "\x00"], [""]),
        ("\\s", [" ", "\t", "\u00a0"], ["a"]),
        ("\\d\\w\\D\\W", ["1_a-"], ["a_a-", "1-a-", "111-", "1aaa"]),
        ("[^\\n\\w]", ["-", "é"], ["a", "\n", "_"]),
        ("[a\\-z]", ["a", "-", "z"], ["b", "\\"]),
        ("[-a]|[a-]", ["-", "a"], ["b"]),
        ("[+--]", ["+", ",", "-"], ["."]),
        ("[\\]^\\\\]", ["]", "^", "\\"], ["["]),
        ("]}", ["]}"], ["}"]),
        ("[$^.*]", ["$", "^", ".", "*"], ["a"]),
        ("\\x41\\u00e9\\t\\/\\.", ["Aé\t/."], ["Aé\t/a"]),
        ("[é-ü]{2}", ["éü"], ["é", "aa"]),
        ("(?:a{2}){2,3}?", ["aaaa", "aaaaaa"], ["aa", "aaaaa"]),
        ("a{0}b{2,}", ["bb", "bbbb"], ["abb", "b"]),
        ('"a"', ['"a"'], ["a"]),
    ],
)
def test_a_regular_expression_matches_whole_texts(texts, regex, accepted, rejected):
    assert texts.accepted("regex", regex, accepted) == accepted
    assert texts.accepted("regex", regex, rejected) == []


@pytest.mark.parametrize(
    ("regex", "position", "said"),
    [
        ("(?=a)b", 1, "lookarounds"),
        ("a(?!b)", 2, "lookarounds"),
        ("(?<n>a)", 1, "named groups"),
        ("(?i)a", 1, "flags"),
        ("a^b", 1, "only at the start"),
        ("a$b", 1, "only at the end"),
        ("(^a)", 1, "only at the start"),
        ("(a$)", 2, "only at the end"),
        ("a\\|^b", 3, "only at the start"),
        ("^*", 1, "something to repeat"),
        ("*a", 0, "something to repeat"),
        ("a**", 2, "something to repeat"),
        ("a{,3}", 1, "something to repeat"),
        ("a{x}", 1, "something to repeat"),
        ("a{3,2}", 1, "the maximum is less than"),
        ("\\bword", 2, r"the escape \\b"),
        ("(a)\\1", 5, r"the escape \\1"),
        ("\\p{L}", 2, r"the escape \\p"),
        ("\\Aa\\Z", 2, r"the escape \\A"),
        ("a\\", 3, "unexpected end"),
        ("\\uD83D\\uDE00", 6, "surrogate"),
        ("(a", 2, r"a \) is missing"),
        ("a)", 1, r"unmatched"),
        ("[a", 2, "unexpected end"),
        ("[]", 2, "no character can match"),
        ("[^\\s\\S]", 7, "no character can match"),
        ("[b-a]", 4, "a range must go"),
        ("[a-\\d]", 5, "a range must go"),
        ("(" * 101 + ")" * 101, 101, "deep"),
        ("a{1001}", 7, "1000 counted"),
        ("(a{50}b){1,21}", 14, "1000 counted"),
        ("((a{11}){10}){10}", 17, "1000 counted"),
    ],
)
def test_unsupported_expressions_are_refused(regex, position, said):
    with pytest.raises(GrammarError, match=rf"position {position}: .*{said}"):
        regex_to_ebnf(regex)


@pytest.mark.parametrize("regex", ['"', "\\\\", "\n", "\\x1f", "[\\t]", '["\\\\]'])
def test_characters_that_json_escapes_cannot_be_matched_in_a_json_string(regex):
    regex_to_ebnf(regex)
    with pytest.raises(GrammarError, match="no character can match here"):
        regex_to_ebnf(regex, IN_JSON_STRING)


@pytest.mark.parametrize(
    ("regex", "name"),
    [
        ("[[:alpha:]]+", "[:alpha:]"),
        ("a[^[:space:]b]", "[:space:]"),
        ("[x[:^digit:]]", "[:^digit:]"),
        ("[[=e=]]", "[=e=]"),
    ],
)
def test_posix_classes_are_refused_by_name(regex, name):
    with pytest.raises(NotEnforcedError, match=re.escape(f"{name} is not enforced")):
        regex_to_ebnf(regex)


def test_a_bracket_in_a_class_is_a_character(texts):
    assert texts.accepted("regex", "[[:a]+", ["[a:", "b"]) == ["[a:"]


@pytest.mark.parametrize("regex", [".", '[^a"]', "[ -~]", "\\W", "\\S", "[\\s\\S]"])
def test_classes_in_a_json_string_exclude_characters_that_json_escapes(texts, regex):
    schema = {"type": "string", "pattern": regex}
    assert texts.accepted_by_schema(schema, ['"-"']) == ['"-"']
    assert texts.accepted_by_schema(schema, ['"""', '"\\"', '"\n"', '"\x7f\x00"']) == []


class RegexMaker:
    """Draws random regular expressions over a, b and c."""

    QUANTIFIERS = ("*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{0}", "*?", "+?")

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def regex(self, depth=3):
        choice = self.draw.random()
        if depth == 0 or choice < 0.35:
            return self.draw.choice(["a", "b", "c", "[ab]", "[^a]", "[b-c]", ".", "\\w", "[^\\d]"])
        if choice < 0.6:
            return "".join(self.regex(depth - 1) for _ in range(self.draw.randint(1, 3)))
        if choice < 0.75:
            return f"(?:{'|'.join(self.draw.choice(['', self.regex(depth - 1)]) for _ in range(3))})"
        return f"({self.regex(depth - 1)}){self.draw.choice(self.QUANTIFIERS)}"


@pytest.mark.parametrize("seed", range(20))
def test_random_expressions_match_the_same_texts_as_in_python(texts, seed):
    maker = RegexMaker(seed)
    for _ in range(10):
        regex = maker.regex()
        words = maker.draw.sample(WORDS, 80)
        assert texts.accepted("regex", regex, words) == [word for word in words if re.fullmatch(regex, word)], regex


@pytest.mark.parametrize(
    ("regex", "accepted", "rejected"),
    [
        ("b", ["b", "ab", "bc", "abc"], ["", "a"]),
        ("^b", ["b", "bc"], ["ab"]),
        ("b$", ["b", "ab"], ["bc"]),
        ("^b$|c", ["b", "ac", "cb"], ["ab", "ba"]),
    ],
)
def test_search_finds_a_match_anywhere(texts, regex, accepted, rejected):
    ebnf = f"root ::= {regex_to_ebnf(regex, search=True)}"
    assert texts.accepted("ebnf", ebnf, [*accepted, *rejected]) == accepted


def test_leading_zeros_of_a_count_are_ignored(texts):
    ebnf = f"root ::= {regex_to_ebnf('a{' + '0' * 5000 + '2}')}"
    assert texts.accepted("ebnf", ebnf, ["a", "aa", "aaa"]) == ["aa"]


def test_only_ascii_digits_are_counts():
    with pytest.raises(GrammarError, match=r"\{ needs something to repeat"):
        regex_to_ebnf("a{\u0663}")


@pytest.mark.parametrize("regex", ["a{" + "9" * 5000 + "}", "a{1," + "9" * 5000 + "}"])
def test_counts_with_many_digits_are_parsed(regex):
    with pytest.raises(GrammarError, match="repetitions"):
        regex_to_ebnf(regex)
