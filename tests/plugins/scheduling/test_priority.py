import pytest
from pydantic import ValidationError

from graftlm.contracts import Preemption, SchedulingContext, SchedulingPolicy
from graftlm.testing import FakeWaitingRequest, SchedulingPolicyConformance
from graftlm_scheduling.options import PreemptivePriorityOptions
from graftlm_scheduling.priority import PreemptivePriority


class TestPreemptivePriority(SchedulingPolicyConformance):
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        return PreemptivePriority(PreemptivePriorityOptions())


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, Preemption(1)), ({"min_difference": 5}, Preemption(5)), ({"preempt": False}, None)],
)
def test_options_set_whether_and_when_the_policy_preempts(options, expected):
    assert PreemptivePriority(PreemptivePriorityOptions(**options)).preemption == expected


def test_the_order_of_arrival_is_kept():
    waiting = [FakeWaitingRequest("a"), FakeWaitingRequest("b", cached_tokens=9), FakeWaitingRequest("c")]
    assert PreemptivePriority(PreemptivePriorityOptions()).order(waiting, 0.0) == waiting


@pytest.mark.parametrize("options", [{"min_difference": 0}, {"preempt": "sometimes"}, {"max_wait_s": 3}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValidationError):
        PreemptivePriorityOptions(**options)
