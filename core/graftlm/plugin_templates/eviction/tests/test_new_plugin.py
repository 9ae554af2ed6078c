"""`new-plugin` under graftlm's conformance kit, and what is particular to it."""

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
        (60.0, leaf(0.0, hits=0), leaf(1.0, hits=0)),  # equal hits: the least recently used
        (60.0, leaf(50.0, hits=0), leaf(0.0, hits=1)),  # a hit is worth a minute
        (60.0, leaf(0.0, hits=1), leaf(61.0, hits=0)),  # and no more
        (0.0, leaf(0.0, hits=9), leaf(1.0, hits=0)),  # without a grace
    ],
)
def test_the_first_goes_before_the_second(grace_s, first, second):
    strategy = RecentAndUsed(RecentAndUsedOptions(grace_s_per_hit=grace_s))
    assert strategy.priority(first) < strategy.priority(second)
