import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.tokenization import StopStrings


def _stream(stops, pieces, include_stop=False, patterns=()):
    strings = StopStrings(stops, include_stop, patterns)
    shown = []
    for piece in pieces:
        match = strings.push(piece)
        shown.append(match.text)
        if match.matched is not None:
            return shown, match.matched
    return [*shown, strings.finish()], None


def _first_match(text, stops):
    """Apply the definition: return the shortest beginning of the text that ends with a stop string."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["STOP"], ["a ST", "OP b"], ["a ", ""], "STOP"),
        (["STOP"], ["a ST", "ART"], ["a ", "START", ""], None),
        (["STOP"], ["a ST"], ["a ", "ST"], None),
        (["aab"], ["aaa", "aab"], ["a", "aa"], "aab"),
        (["\n\n", "END"], ["x\n", "END"], ["x", "\n"], "END"),
        (["bc", "abcd"], ["abcd"], ["a"], "bc"),
        (["abc", "bc"], ["xabc"], ["x"], "abc"),
        (["bc", "abc"], ["xabc"], ["xa"], "bc"),
        ([], ["any", "thing"], ["any", "thing", ""], None),
    ],
)
def test_text_is_emitted_up_to_the_first_complete_match(stops, pieces, shown, matched):
    assert _stream(stops, pieces) == (shown, matched)


@pytest.mark.parametrize(
    ("stops", "patterns", "pieces", "shown", "matched"),
    [
        ([], [r"\d{3}"], ["a 12", "3 b"], ["a ", ""], r"\d{3}"),
        ([], [r"\d{3}"], ["a 12", "x"], ["a ", "12x", ""], None),
        ([], [r"\d{3}"], ["a 12"], ["a ", "12"], None),
        (["12"], [r"\d{3}"], ["a 1", "23"], ["a ", ""], "12"),
        (["123"], [r"\d{3}"], ["a123"], ["a"], "123"),
        (["23"], [r"1.3"], ["a123"], ["a1"], "23"),
        (["x1234"], [r"\d{3}"], ["ax12", "34"], ["a", "x"], r"\d{3}"),
        ([], ["bc", "abcd?"], ["ab", "cd"], ["", "a"], "bc"),
    ],
)
def test_patterns_end_the_text_like_strings(stops, patterns, pieces, shown, matched):
    assert _stream(stops, pieces, patterns=patterns) == (shown, matched)


@settings(deadline=None)
@given(
    patterns=st.lists(st.sampled_from(["ab+c", "[bc]{2}a", "c.c", "(a|ab)c"]), min_size=1, max_size=3),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    include_stop=st.booleans(),
)
def test_with_patterns_the_result_does_not_depend_on_the_pieces(patterns, stops, pieces, include_stop):
    shown, matched = _stream(stops, pieces, include_stop, patterns)
    whole, matched_in_whole = _stream(stops, ["".join(pieces)], include_stop, patterns)
    assert ("".join(shown), matched) == ("".join(whole), matched_in_whole)


def test_a_pattern_that_matches_while_unarmed_is_text():
    strings = StopStrings([], patterns=["a+b"])
    assert strings.push("xaab", armed=False).matched is None
    match = strings.push("yab")
    assert (match.text, match.matched) == ("aaby", "a+b")


def test_the_match_of_a_pattern_can_be_kept():
    assert _stream([], ["a 12", "34"], include_stop=True, patterns=[r"\d+4"]) == (["a ", "1234"], r"\d+4")


def test_the_match_can_be_kept():
    assert _stream(["STOP"], ["a ST", "OP b"], include_stop=True) == (["a ", "STOP"], "STOP")


@settings(deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    include_stop=st.booleans(),
)
def test_the_result_does_not_depend_on_the_pieces_of_the_text(stops, pieces, include_stop):
    text = "".join(pieces)
    shown, matched = _stream(stops, pieces, include_stop)
    first = _first_match(text, stops)
    if first is None:
        assert ("".join(shown), matched) == (text, None)
    else:
        end, stop = first
        assert ("".join(shown), matched) == (text[: end if include_stop else end - len(stop)], stop)


@settings(deadline=None)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), text=st.text("abc", max_size=12))
def test_only_the_possible_beginning_of_a_match_is_held_back(stops, text):
    strings = StopStrings(stops)
    shown = ""
    for i, character in enumerate(text):
        match = strings.push(character)
        shown += match.text
        if match.matched is not None:
            break
        seen = text[: i + 1]
        longest = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert shown == seen[: len(seen) - longest]


def test_a_string_completed_while_unarmed_is_text_and_one_completed_later_is_a_match():
    strings = StopStrings(["ab", "abc"])
    assert strings.push("xab", armed=False).text == "x"
    match = strings.push("c", armed=True)
    assert (match.text, match.matched) == ("", "abc")
    strings = StopStrings(["abab"])
    assert strings.push("abab", armed=False).text == "ab"
    match = strings.push("abx", armed=True)
    assert (match.text, match.matched) == ("", "abab")
    strings = StopStrings(["b", "abc"])
    assert strings.push("ab", armed=False).text == ""
    match = strings.push("x", armed=True)
    assert (match.text, match.matched) == ("abx", None)
