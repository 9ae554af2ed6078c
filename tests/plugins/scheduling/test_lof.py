from graftlm.contracts import SchedulingContext, SchedulingPolicy
from graftlm.testing import FakeWaitingRequest, SchedulingPolicyConformance
from graftlm_scheduling.lof import LongestOutputFirst
from graftlm_scheduling.options import ReorderingOptions


class TestLongestOutputFirst(SchedulingPolicyConformance):
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        return LongestOutputFirst(ReorderingOptions())


def test_the_longest_possible_output_comes_first_and_ties_by_arrival():
    waiting = [FakeWaitingRequest(str(idx), max_new_tokens=tokens) for idx, tokens in enumerate([5, 9, 5, 30])]
    ordered = LongestOutputFirst(ReorderingOptions()).order(waiting, 0.0)
    assert [request.request_id for request in ordered] == ["3", "1", "0", "2"]
