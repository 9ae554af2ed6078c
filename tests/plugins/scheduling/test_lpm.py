import pytest
from pydantic import ValidationError

from graftlm.contracts import SchedulingContext, SchedulingPolicy
from graftlm.testing import FakeWaitingRequest, SchedulingPolicyConformance
from graftlm_scheduling.lpm import LongestPrefixMatch, LongestPrefixMatchOptions


class TestLongestPrefixMatch(SchedulingPolicyConformance):
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        return LongestPrefixMatch(LongestPrefixMatchOptions())


@pytest.mark.parametrize(
    ("cached", "window", "expected"),
    [
        ([], 256, []),
        ([0, 8, 4], 256, [1, 2, 0]),
        ([4, 0, 4, 0, 4], 256, [0, 2, 4, 1, 3]),
        ([0, 8, 16], 2, [1, 0, 2]),
        ([0, 8, 16], 1, [0, 1, 2]),
    ],
)
def test_most_cached_goes_first_and_ties_as_they_came(cached, window, expected):
    waiting = [FakeWaitingRequest(str(idx), cached_tokens=tokens) for idx, tokens in enumerate(cached)]
    policy = LongestPrefixMatch(LongestPrefixMatchOptions(window=window))
    assert policy.order(waiting, 0.0) == [waiting[idx] for idx in expected]


def test_max_wait_is_an_option():
    assert LongestPrefixMatch(LongestPrefixMatchOptions(max_wait_s=2.5)).max_wait_s == 2.5


@pytest.mark.parametrize("options", [{"max_wait_s": 0}, {"max_wait_s": -1}, {"window": 0}, {"max_wait": 3}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValidationError):
        LongestPrefixMatchOptions(**options)
