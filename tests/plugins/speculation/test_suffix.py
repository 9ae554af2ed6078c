import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graftlm.contracts import Drafter, DrafterContext, DraftRequest
from graftlm.testing.drafter import DrafterConformance
from graftlm_speculation.options import SuffixOptions
from graftlm_speculation.suffix import SuffixDrafter, longest_earlier


class TestSuffixDrafter(DrafterConformance):
    def create(self, context: DrafterContext) -> Drafter:
        return SuffixDrafter(SuffixOptions())


class TestSuffixDrafterWithShortMatches(DrafterConformance):
    def create(self, context: DrafterContext) -> Drafter:
        return SuffixDrafter(SuffixOptions(min_match_tokens=1, max_match_tokens=1))


def tokens_of(text) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def draft_for(text, limit=8, **options):
    request = DraftRequest(0, "", tokens_of(text), limit)
    (draft,) = SuffixDrafter(SuffixOptions(**options)).propose([request])
    return draft


def drafted(text, limit=8, **options):
    """Return the drafted text; None without a draft."""
    draft = draft_for(text, limit, **options)
    return None if draft is None else "".join(map(chr, draft.token_ids.tolist()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("a", None),
        ("abcdef", None),
        ("ab1...b", None),  # one token is too short
        ("ab1...ab", "1...ab1."),
        ("ab1.ab2.ab", "2.ab2.ab"),  # of equally long matches, the latest
        ("xab1.yab2.xab", "1.yab2.x"),  # a longer match, although it is older
        ("the cat. the dog. the c", "at. the "),
    ],
)
def test_what_followed_the_longest_match_is_drafted(text, expected):
    assert drafted(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aa", "a" * 20),
        ("xaaaa", "a" * 20),
        ("abab", "ab" * 10),
        ("...abcabc", ("abc" * 7)[:20]),
        ("ab1ab", ("1ab" * 7)[:20]),
    ],
)
def test_a_text_of_a_short_period_goes_on_for_the_whole_draft(text, expected):
    assert drafted(text, limit=20, min_match_tokens=1) == expected


@pytest.mark.parametrize("limit", [1, 2, 7, 40])
def test_a_draft_is_as_long_as_its_limit(limit):
    text = "abcdefghijkl" * 2
    assert drafted(text, limit) == (text * 3)[24 : 24 + limit]


@pytest.mark.parametrize(("min_match", "expected"), [(1, "4.123"), (3, "4.123"), (4, None)])
def test_shorter_matches_than_the_minimum_are_ignored(min_match, expected):
    assert drafted("1234.123", limit=5, min_match_tokens=min_match) == expected


def test_tokens_before_the_maximum_are_not_compared():
    text = "xab1.yab2.xab"
    assert drafted(text, limit=1, max_match_tokens=3) == "1"
    assert drafted(text, limit=1, max_match_tokens=2) == "2"


def test_confidence_grows_with_the_match():
    confidences = [draft_for(f"{part}1.{part}", min_match_tokens=1).confidence for part in ("a", "ab", "abc", "abcdef")]
    assert confidences == sorted(set(confidences))
    assert 0.0 < confidences[0] < confidences[-1] < 1.0


def test_drafts_do_not_depend_on_the_other_requests():
    requests = [
        DraftRequest(row, namespace, tokens_of(text), 3)
        for row, (namespace, text) in enumerate([("", "ab1.ab"), ("tenant", "ab2.ab"), ("", "ab")])
    ]
    first, second, third = SuffixDrafter(SuffixOptions()).propose(requests)
    assert first.token_ids.tolist() == tokens_of("1.a").tolist()
    assert second.token_ids.tolist() == tokens_of("2.a").tolist()
    assert third is None


def brute_force(tokens, max_match):
    for num_matched in range(min(max_match, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, num_matched - 1, -1):
            if tokens[end - num_matched : end] == tokens[-num_matched:]:
                return num_matched, end
    return 0, 0


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 12))
@example([0, 0], 12)
@example([0] * 40, 40)
def test_the_longest_earlier_occurrence_is_that_of_a_search_by_brute_force(tokens, max_match):
    assert longest_earlier(np.array(tokens, dtype=np.int32), max_match) == brute_force(tokens, max_match)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.lists(st.integers(0, 1), max_size=12))
def test_so_it_is_where_there_are_thousands_of_occurrences(period, end):
    tokens = (period * 3000)[:3000] + end
    assert longest_earlier(np.array(tokens, dtype=np.int32), 16) == brute_force(tokens, 16)


@pytest.mark.parametrize("kind", ["random", "few tokens", "one token", "one token, once interrupted"])
def test_100_000_tokens_take_a_few_milliseconds(kind):
    draw = np.random.default_rng(0)
    tokens = {
        "random": draw.integers(0, 32_000, 100_000),
        "few tokens": draw.integers(0, 2, 100_000),
        "one token": np.zeros(100_000),
        "one token, once interrupted": np.arange(100_000) == 99_990,
    }[kind].astype(np.int32)
    drafter = SuffixDrafter(SuffixOptions())
    seconds = []
    for _ in range(20):  # the fastest of them, for other programs use the CPU, too
        start = time.perf_counter()
        drafter.propose([DraftRequest(0, "", tokens, 15)])
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.006
