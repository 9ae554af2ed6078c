import pytest

import graftlm_eviction
from graftlm.contracts import API_VERSION, EvictionContext, EvictionStrategy
from graftlm.testing import CacheRig, EvictionStrategyConformance
from graftlm.testing.prefix_cache_machine import check_random_histories
from graftlm_cache.radix import RadixCache

PAGE_SIZE = 4
PROVIDERS = graftlm_eviction.provide_eviction_strategies()

by_name = pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.name)


class TestBuiltInStrategies(EvictionStrategyConformance):
    max_examples = 4

    @pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.name, autouse=True)
    def provider(self, request: pytest.FixtureRequest) -> None:
        self._provider = request.param

    def create(self, context: EvictionContext) -> EvictionStrategy:
        return self._provider.create(self._provider.options(), context)


@by_name
def test_a_radix_cache_evicts_in_the_order_of_a_full_sort(provider):
    def rig():
        context = EvictionContext(total_pages=32, page_size=PAGE_SIZE)
        return CacheRig(RadixCache, PAGE_SIZE, provider.create(provider.options(), context))

    check_random_histories(rig, max_examples=8)


def test_the_package_offers_all_strategies():
    names = ["lru", "slru", "lfu", "fifo", "filo", "mru", "priority", "reuse_odds"]
    assert [provider.name for provider in PROVIDERS] == names
    assert {provider.api_version for provider in PROVIDERS} == {API_VERSION}
