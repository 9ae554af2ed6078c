"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import pytest
from graftlm.contracts import NodeStats
from graftlm.testing import EvictionStrategyConformance

from graftlm_new_plugin import provide_eviction_strategies
from graftlm_new_plugin.strategy import RecentAndUsed, RecentAndUsedOptions


class TestContract(EvictionStrategyConformance):
    def create(self, context):
        (provider,) = provide_eviction_strategies()
        return provider.create(provider.options(), context)


def leaf(last_access, hits):
    return NodeStats(created=0.0, last_access=last_access, hits=hits, tokens=1)


@pytest.mark.parametrize(
    ("grace_s", "first", "second"),
    [
        (60.0, leaf(0.0, hits=0), leaf(1.0, hits=0)),  # with equal hits, the least recently used is first
        (60.0, leaf(50.0, hits=0), leaf(0.0, hits=1)),  # a hit adds one minute
        (60.0, leaf(0.0, hits=1), leaf(61.0, hits=0)),  # a hit adds no more than one minute
        (0.0, leaf(0.0, hits=9), leaf(1.0, hits=0)),  # without a grace period, hits have no effect
    ],
)
def test_the_first_goes_before_the_second(grace_s, first, second):
    strategy = RecentAndUsed(RecentAndUsedOptions(grace_s_per_hit=grace_s))
    assert strategy.priority(first) < strategy.priority(second)
