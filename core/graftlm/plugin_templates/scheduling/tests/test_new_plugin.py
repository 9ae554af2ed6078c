"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

from graftlm.testing import FakeWaitingRequest, SchedulingPolicyConformance

from graftlm_new_plugin import provide_scheduling_policies
from graftlm_new_plugin.policy import ShortestFirst, ShortestFirstOptions


class TestContract(SchedulingPolicyConformance):
    def create(self, context):
        (provider,) = provide_scheduling_policies()
        return provider.create(provider.options(), context)


def test_the_least_work_goes_first():
    waiting = [
        FakeWaitingRequest("long", num_tokens=100, max_new_tokens=10),
        FakeWaitingRequest("cached", num_tokens=100, max_new_tokens=10, cached_tokens=95),
        FakeWaitingRequest("short", num_tokens=10, max_new_tokens=10),
    ]
    ordered = ShortestFirst(ShortestFirstOptions()).order(waiting, now=0.0)
    assert [request.request_id for request in ordered] == ["cached", "short", "long"]
