from dataclasses import replace

import numpy as np
import pytest

import graftlm_cache
from graftlm.contracts import API_VERSION, CacheCapabilities, CacheContext, Platform
from graftlm.testing import OldestAccessFirst, TickingClock
from graftlm.testing.state_cache import FakeStates
from graftlm_cache.state_radix import StateRadixCache

PROVIDERS = {provider.name: provider for provider in graftlm_cache.provide_prefix_caches()}


class NoWindows:
    reach_pages = 3

    def holds(self, pages):
        return np.zeros(len(pages), dtype=np.bool_)


@pytest.mark.parametrize(
    ("name", "class_name", "windowed_class_name", "can"),
    [
        ("radix", "RadixCache", "RadixCache", CacheCapabilities(reuses=True, state=True)),
        ("chunk", "ChunkCache", "ChunkCache", CacheCapabilities(reuses=False, state=True)),
        ("swa_radix", "RadixCache", "SWARadixCache", CacheCapabilities(reuses=True, window=True)),
        ("swa_chunk", "ChunkCache", "ChunkCache", CacheCapabilities(reuses=False, window=True)),
    ],
)
def test_a_provider_creates_its_cache_and_declares_its_capabilities(name, class_name, windowed_class_name, can):
    provider = PROVIDERS[name]
    context = CacheContext(1, OldestAccessFirst(), TickingClock())
    assert type(provider.create(provider.options(), context)).__name__ == class_name
    windowed = provider.create(provider.options(), replace(context, window=NoWindows()))
    assert type(windowed).__name__ == windowed_class_name
    assert provider.capabilities == can
    assert provider.api_version == API_VERSION
    assert provider.unavailable(Platform()) is None


def test_auto_selects_radix():
    assert max(PROVIDERS.values(), key=lambda provider: provider.rank).name == "radix"


def test_radix_matches_where_states_are_stored_if_the_model_has_states():
    provider = PROVIDERS["radix"]
    context = CacheContext(1, OldestAccessFirst(), TickingClock(), states=FakeStates())
    cache = provider.create(provider.options(state_interval_tokens=64), context)
    assert isinstance(cache, StateRadixCache)
    assert cache.state_interval_tokens == 64
