import pytest

from graftlm.contracts import SchedulingContext, SchedulingPolicy
from graftlm.testing import FakePrefixGroup, FakeWaitingRequest, SchedulingPolicyConformance
from graftlm_scheduling.dfs_weight import DepthFirstByWeight
from graftlm_scheduling.options import ReorderingOptions

OUTER = FakePrefixGroup(8, 4)
INNER = FakePrefixGroup(12, 2, OUTER)
LIGHT = FakePrefixGroup(30, 3)


class TestDepthFirstByWeight(SchedulingPolicyConformance):
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        return DepthFirstByWeight(ReorderingOptions())


@pytest.mark.parametrize(
    ("groups", "cached", "expected"),
    [
        ([], [], ""),
        ([None, None, None], [0, 0, 0], "012"),
        ([None, LIGHT, OUTER, LIGHT, INNER, OUTER, LIGHT, INNER], [0] * 8, "47251360"),
        ([LIGHT, LIGHT, LIGHT, OUTER, OUTER, OUTER, OUTER], [4, 4, 4, 0, 0, 0, 0], "0123456"),
        ([OUTER, OUTER, INNER, INNER], [8, 9, 8, 8], "1230"),
        ([None, None, OUTER, OUTER, OUTER, OUTER], [0, 3, 0, 0, 0, 0], "123450"),
    ],
    ids=["nobody", "no groups", "heaviest first", "warm first", "warm means past what all share", "warm loner"],
)
def test_cached_branches_come_first_then_heavy_ones_then_by_arrival(groups, cached, expected):
    waiting = [
        FakeWaitingRequest(str(idx), group=group, cached_tokens=tokens)
        for idx, (group, tokens) in enumerate(zip(groups, cached, strict=True))
    ]
    ordered = DepthFirstByWeight(ReorderingOptions()).order(waiting, 0.0)
    assert "".join(request.request_id for request in ordered) == expected
