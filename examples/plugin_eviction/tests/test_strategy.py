"""Runs graftlm's conformance kit on `costly-last`, and tests its order of eviction."""

import pytest
from graftlm_costly_last import provide_eviction_strategies
from graftlm_costly_last.strategy import CostlyLast, CostlyLastOptions

from graftlm.contracts import EvictionContext, EvictionStrategy, NodeStats
from graftlm.testing import EvictionStrategyConformance


class TestCostlyLast(EvictionStrategyConformance):
    def create(self, context: EvictionContext) -> EvictionStrategy:
        (provider,) = provide_eviction_strategies()
        return provider.create(provider.options(), context)


def leaf(last_access: float, tokens: int, depth: int = 0) -> NodeStats:
    return NodeStats(created=0.0, last_access=last_access, tokens=tokens, depth=depth)


@pytest.mark.parametrize(
    ("grace_s", "first", "second"),
    [
        (10.0, leaf(1.0, tokens=50), leaf(0.0, tokens=1000)),  # the short leaf is first, although used later
        (10.0, leaf(0.0, tokens=1000), leaf(30.0, tokens=50)),  # the grace period of the long leaf has ended
        (10.0, leaf(0.0, tokens=1000), leaf(0.0, tokens=1000, depth=50_000)),  # tokens after a long context cost more
        (0.0, leaf(0.0, tokens=1000), leaf(1.0, tokens=50)),  # without a grace period: LRU
    ],
)
def test_the_first_goes_before_the_second(grace_s, first, second):
    strategy = CostlyLast(CostlyLastOptions(grace_s_per_1000_tokens=grace_s))
    assert strategy.priority(first) < strategy.priority(second)
