import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.tokenization import StopStrings


def _stream(stops, pieces, include_stop=False):
    strings = StopStrings(stops, include_stop)
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
