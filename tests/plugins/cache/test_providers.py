import pytest

import graftlm_cache
from graftlm.contracts import API_VERSION, CacheCapabilities, CacheContext, NoOptions, Platform
from graftlm.testing import OldestAccessFirst, TickingClock

PROVIDERS = {provider.name: provider for provider in graftlm_cache.provide_prefix_caches()}


@pytest.mark.parametrize(
    ("name", "class_name", "reuses"), [("radix", "RadixCache", True), ("chunk", "ChunkCache", False)]
)
def test_a_provider_creates_its_cache_and_says_what_it_can(name, class_name, reuses):
    provider = PROVIDERS[name]
    cache = provider.create(NoOptions(), CacheContext(1, OldestAccessFirst(), TickingClock()))
    assert type(cache).__name__ == class_name
    assert provider.capabilities == CacheCapabilities(reuses=reuses)
    assert provider.api_version == API_VERSION
    assert provider.unavailable(Platform()) is None


def test_auto_is_radix():
    assert max(PROVIDERS.values(), key=lambda provider: provider.rank).name == "radix"
