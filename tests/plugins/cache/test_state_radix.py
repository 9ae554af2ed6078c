from dataclasses import replace

import pytest

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.testing import PrefixCacheConformance, StateCacheConformance
from graftlm.testing.state_cache import FakeStates
from graftlm_cache.state_radix import StateRadixCache


def create(context: CacheContext) -> StateRadixCache:
    assert context.states is not None
    return StateRadixCache(context, context.states)


@pytest.mark.few(page_size=2)
class TestStateRadixCacheWithEveryState(PrefixCacheConformance):
    max_examples = 20

    def create(self, context: CacheContext) -> PrefixCache:
        return create(replace(context, states=FakeStates()))


class TestStateRadixCache(StateCacheConformance):
    def create(self, context: CacheContext) -> PrefixCache:
        return create(context)
