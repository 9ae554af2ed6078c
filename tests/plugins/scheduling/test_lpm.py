import pytest
from pydantic import ValidationError

from graftlm.contracts import SchedulingContext, SchedulingPolicy
from graftlm.testing import FakePrefixGroup, FakeWaitingRequest, SchedulingPolicyConformance
from graftlm_scheduling.lpm import LongestPrefixMatch
from graftlm_scheduling.options import ReorderingOptions


class TestLongestPrefixMatch(SchedulingPolicyConformance):
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        return LongestPrefixMatch(ReorderingOptions())


def order(waiting: list[FakeWaitingRequest]) -> str:
    return "".join(request.request_id for request in LongestPrefixMatch(ReorderingOptions()).order(waiting, 0.0))


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ([], ""),
        ([0, 8, 4], "120"),
        ([4, 0, 4, 0, 4], "02413"),
        ([0, 8, 16], "210"),
    ],
)
def test_the_most_cached_tokens_come_first_and_ties_by_arrival(cached, expected):
    assert order([FakeWaitingRequest(str(idx), cached_tokens=tokens) for idx, tokens in enumerate(cached)]) == expected


def test_among_equal_requests_a_group_follows_its_first_member():
    outer = FakePrefixGroup(8, 5)
    inner = FakePrefixGroup(12, 2, outer)
    other = FakePrefixGroup(30, 3)
    groups = [None, outer, other, inner, outer, None, other, inner, outer, other]
    assert order([FakeWaitingRequest(str(idx), group=group) for idx, group in enumerate(groups)]) == "0137482695"


def test_a_longer_match_comes_before_its_group():
    group = FakePrefixGroup()
    waiting = [
        FakeWaitingRequest("a", group=group),
        FakeWaitingRequest("b"),
        FakeWaitingRequest("c", cached_tokens=9, group=group),
    ]
    assert order(waiting) == "cab"


def test_a_thousand_requests_are_ordered_like_ten():
    waiting = [FakeWaitingRequest(f"{idx} ", cached_tokens=idx) for idx in range(1000)]
    assert order(waiting).split() == [str(idx) for idx in reversed(range(1000))]


def test_max_wait_is_an_option():
    assert LongestPrefixMatch(ReorderingOptions(max_wait_s=2.5)).max_wait_s == 2.5


@pytest.mark.parametrize("options", [{"max_wait_s": 0}, {"max_wait_s": -1}, {"window": 256}, {"max_wait": 3}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValidationError):
        ReorderingOptions(**options)
