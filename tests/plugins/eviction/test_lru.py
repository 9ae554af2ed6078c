import pytest

import graftlm_eviction
from graftlm.contracts import API_VERSION, EvictionContext, EvictionStrategy, NodeStats, NoOptions
from graftlm.testing import EvictionStrategyConformance
from graftlm_eviction.lru import LRU


class TestLRU(EvictionStrategyConformance):
    def create(self, context: EvictionContext) -> EvictionStrategy:
        return LRU()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (NodeStats(created=0.0, last_access=1.0), NodeStats(created=0.0, last_access=2.0)),
        (NodeStats(created=5.0, last_access=5.0, hits=9, priority=3), NodeStats(created=0.0, last_access=6.0)),
    ],
)
def test_the_longest_unused_goes_first(first, second):
    strategy = LRU()
    assert strategy.priority(first) < strategy.priority(second)


def test_the_provider_creates_it():
    (provider,) = graftlm_eviction.provide_eviction_strategies()
    strategy = provider.create(NoOptions(), EvictionContext(total_pages=8, page_size=1))
    assert (provider.name, provider.api_version, type(strategy)) == ("lru", API_VERSION, LRU)
