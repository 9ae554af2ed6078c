"""Stop patterns: matches by definition, what is held back, refused patterns, and time."""

import random
import re
import time
import tracemalloc

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from graftlm.stop_patterns import MAX_MATCH_CHARS, Automaton, PatternError, PatternTracker, compile_pattern


def first_match(pattern, text):
    """Apply the definition by trying all ends and starts: (start, end), or None."""
    compiled = re.compile(pattern)
    for end in range(len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return start, end
    return None


def search(pattern, text):
    """Return (start, end) of the match that a tracker finds, or None."""
    tracker = PatternTracker(compile_pattern(pattern))
    for end, character in enumerate(text, start=1):
        if tracker.advance(character):
            return end - tracker.match_len, end
    return None


@pytest.mark.parametrize(
    ("pattern", "text", "match"),
    [
        ("STOP", "a STOP b", (2, 6)),
        ("a+", "baaa", (1, 2)),
        ("a+b", "xaaab", (1, 5)),
        ("a+?b", "xaaab", (1, 5)),
        ("[a-z]{2}", "Abc", (1, 3)),
        ("[^a-z]{2}", "ab1c23", (4, 6)),
        (r"\d{3,5}", "12 1234", (3, 6)),
        (r"\n\n+", "a\n\n\nb", (1, 3)),
        ("ab|abc|b", "xabc", (1, 3)),
        ("(foo|ba[rz])!", "foo bar baz!", (8, 12)),
        ("(?i)stop", "a StOp", (2, 6)),
        ("(?i)straße", "STRASSE Straße", (8, 14)),
        ("(?i:A)b", "ab aB Ab", (0, 2)),
        ("(?s)a.b", "a\nb", (0, 3)),
        ("a.b", "a\nb axb", (4, 7)),
        ("(?:ab)*c", "ababc", (0, 5)),
        ("(?:ab){2}", "abab", (0, 4)),
        ("x(a|b(c|d)*)?y", "xbcdcy", (0, 6)),
        ("^ab", "abab", (0, 2)),
        ("^ab", "xab", None),
        (r"\Aab", "ab", (0, 2)),
        ("(?m)^#", "a#\n#", (3, 4)),
        ("(?m)^#", "#a", (0, 1)),
        ("(?m)a\n^b", "a\nb", (0, 3)),
        ("(?m)x|^y", "ay\ny", (3, 4)),
        (r"\w+\s\W", "Hä ?", (0, 4)),
        (r"(?a)\w\s", "ä b ", (2, 4)),
        (r"(?a)\w(?u:\w)", "aä", (0, 2)),
        ("(?:){4000000000}a", "ba", (1, 2)),
        ("((){,4000000000}){4000000000}a", "ba", (1, 2)),
        ("[\\]a-]b", "x]b", (1, 3)),
        ("[^\\]]\\]", "]]a]", (2, 4)),
        ("😀{2}", "a😀😀", (1, 3)),
        ("(?x) a b  # text\n c", "abc", (0, 3)),
        ("(?P<n>a)b", "ab", (0, 2)),
        ("a{0}b", "ab", (1, 2)),
        ("no", "yes", None),
    ],
)
def test_a_match_is_found_at_its_earliest_end_and_start(pattern, text, match):
    assert search(pattern, text) == match


@settings(deadline=None, max_examples=400)
@given(
    pattern=st.from_regex(r"(\(?[abc.]\)?[*+?]?|\[ab\]|\(a\|bc\)[+*]?|b\{1,3\}|\n){1,5}", fullmatch=True),
    text=st.text("abc\n", max_size=14),
)
@example(pattern="a.*b", text="ab")
def test_a_search_finds_what_the_definition_says(pattern, text):
    try:
        found = search(pattern, text)
    except PatternError:
        assume(False)
    assert found == first_match(pattern, text)


@settings(deadline=None, max_examples=300)
@given(
    pattern=st.sampled_from(["ab", "a+b", "(ab|ba)c", "a[bc]{2}a", "(?m)^b+c", r"\n\nc", "a.c", "(a|ab)(c|bcb)"]),
    text=st.text("abc\n", max_size=20),
)
def test_no_text_is_released_that_a_later_match_removes(pattern, text):
    tracker = PatternTracker(compile_pattern(pattern))
    match = first_match(pattern, text)
    for end, character in enumerate(text, start=1):
        if tracker.advance(character):
            assert match == (end - tracker.match_len, end)
            return
        assert match is None or end - tracker.held_len <= match[0]
    assert match is None


@pytest.mark.parametrize(
    ("pattern", "text", "held"),
    [("STOP", "a ST", 2), ("STOP", "a SX", 0), (r"\n\nQ", "a\n\n", 2), ("[a-z]+:", "to be", 2), ("[a-z]+:", "to ", 0)],
)
def test_only_the_possible_beginning_of_a_match_is_held_back(pattern, text, held):
    tracker = PatternTracker(compile_pattern(pattern))
    assert not any(map(tracker.advance, text))
    assert tracker.held_len == held


def test_a_long_match_removes_its_last_characters_only():
    tracker = PatternTracker(compile_pattern("(?s)<a>.*</a>"))
    text = "<a>" + "x" * 2 * MAX_MATCH_CHARS
    assert not any(map(tracker.advance, text))
    assert tracker.held_len == MAX_MATCH_CHARS
    assert [tracker.advance(character) for character in "</a>"] == [False, False, False, True]
    assert tracker.match_len == MAX_MATCH_CHARS


def test_a_short_match_in_a_long_partial_one_removes_only_itself():
    tracker = PatternTracker(compile_pattern("(?s)<a>.*</a>|STOP"))
    text = "<a>" + "x" * 2 * MAX_MATCH_CHARS + "STOP"
    assert [tracker.advance(character) for character in text][-1]
    assert tracker.match_len == 4


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "is not a regular expression: missing )"),
        ("a**", "is not a regular expression: multiple repeat"),
        ("[z-a]", "is not a regular expression: bad character range"),
        ("(?P<a>x)(?P=a)", "has references to groups"),
        (r"(a)\1", "has references to groups, which cannot be matched in linear time"),
        ("(a)?(?(1)b|c)", "has conditions on groups"),
        ("a(?=b)", "has lookahead and lookbehind"),
        ("(?<!a)b", "has lookahead and lookbehind"),
        ("(?>a)b", "has atomic groups"),
        ("a++b", "has possessive repetition"),
        ("a$", "has $, which depends on the text after it"),
        (r"\bab", r"has \b, which"),
        (r"a\B", r"has \B, which"),
        (r"a\Z", r"has \Z, which"),
        ("", "matches the empty text"),
        ("a*", "matches the empty text"),
        ("(?m)^", "matches the empty text"),
        ("(a|b?)", "matches the empty text"),
        ("(a{30}){30}", "needs more than 256 states"),
        ("a{99999999999}", "is not a regular expression: the repetition number is too large"),
        (".{600}", "needs more than 256 states"),
        ("(" * 5000 + "a" + ")" * 5000, "is nested too deeply"),
    ],
)
def test_a_pattern_that_cannot_end_a_text_is_refused(pattern, says):
    with pytest.raises(PatternError, match=f"^{re.escape(says)}"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+b", "a" * 20_000),
        ("(a|a)*b", "a" * 20_000),
        ("(a|aa)+c", "a" * 20_000),
        ("(.*)(.*)(.*)x", "y" * 20_000),
        ("(a?){60}a{60}b", "a" * 20_000),
        ("[ab]*a[ab]{12}c", "abbabaaabb" * 2_000),  # its deterministic automaton has thousands of states
    ],
)
def test_catastrophic_patterns_take_linear_time(pattern, text):
    start_s = time.process_time()
    assert search(pattern, text) is None
    assert time.process_time() - start_s < 20


@pytest.mark.parametrize(
    "pattern", ["(?:[ab]?){120}[ab]*X", "(?:(?i:[a-z])?){120}(?i:[a-z]*)X", "(?:[ab]|a|b?)*a[ab]{60}X"]
)
def test_the_start_of_a_long_match_is_found_in_linear_time(pattern):
    text = "".join(random.Random(1).choices("ab", k=MAX_MATCH_CHARS)) + "a" * 61 + "X"
    start_s = time.process_time()
    assert search(pattern, text) == (len(text) - MAX_MATCH_CHARS, len(text))
    assert time.process_time() - start_s < 5


@pytest.mark.full
def test_a_hostile_pattern_needs_little_memory():
    automaton = Automaton("[ab]*a[ab]{240}c")  # almost each character leads to a new state
    text = random.Random(1).choices("ab", k=20_000)
    tracemalloc.start()
    try:
        tracker = PatternTracker(automaton)
        assert not any(map(tracker.advance, text))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_text_of_many_characters_keeps_the_automaton_small():
    automaton = compile_pattern("a[^x]{3}x")
    for _ in range(3):
        tracker = PatternTracker(automaton)
        assert not any(map(tracker.advance, map(chr, range(0x4E00, 0x9FFF))))
    assert automaton._num_transitions <= 10_000
    assert search("a[^x]{3}x", "aaabcx") == (1, 6)
