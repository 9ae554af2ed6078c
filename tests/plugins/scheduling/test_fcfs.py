from graftlm.contracts import SchedulingContext, SchedulingPolicy
from graftlm.testing import FakeWaitingRequest, SchedulingPolicyConformance
from graftlm_scheduling.fcfs import FirstComeFirstServed


class TestFirstComeFirstServed(SchedulingPolicyConformance):
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        return FirstComeFirstServed()


def test_the_order_of_arrival_is_kept_for_any_cached_tokens():
    waiting = [FakeWaitingRequest("a"), FakeWaitingRequest("b", cached_tokens=9), FakeWaitingRequest("c", priority=9)]
    policy = FirstComeFirstServed()
    assert policy.order(waiting, 0.0) == waiting
    assert policy.max_wait_s is None
