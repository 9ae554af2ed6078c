"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import pytest
from graftlm.contracts import ReplicaStates
from graftlm.testing import FakeRoutedRequest, RoutingPolicyConformance

from graftlm_new_plugin import provide_routing_policies
from graftlm_new_plugin.policy import StickyKeys, StickyKeysOptions


class TestContract(RoutingPolicyConformance):
    def create(self, context):
        (provider,) = provide_routing_policies()
        return provider.create(provider.options(), context)


@pytest.mark.parametrize(("ready", "num_requests", "expected"), [(True, 1, 1), (True, 2, 0), (False, 1, 0)])
def test_a_key_stays_while_its_replica_is_ready_and_has_few_requests(ready, num_requests, expected):
    policy, states = StickyKeys(StickyKeysOptions(stay_below=2)), ReplicaStates.idle(2, ready=True)
    policy.sent(FakeRoutedRequest(key="conversation"), 1)
    states.ready[1], states.num_requests[1] = ready, num_requests
    assert policy.choose(FakeRoutedRequest(key="conversation"), states, now_s=0.0) == expected
    assert policy.choose(FakeRoutedRequest(key="another"), states, now_s=0.0) == 0
