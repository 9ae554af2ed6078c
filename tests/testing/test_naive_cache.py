import pytest

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.errors import InvariantError
from graftlm.testing import CacheRig, NaiveCache, PrefixCacheConformance


@pytest.mark.few(page_size=2)
class TestNaiveCache(PrefixCacheConformance):
    def create(self, context: CacheContext) -> PrefixCache:
        return NaiveCache(context)


class TestCoarseCache(PrefixCacheConformance):
    """A cache with blocks of 48 tokens for any page size; only multiples of 48 tokens are shared."""

    granularity_tokens = 48
    max_examples = 10

    def create(self, context: CacheContext) -> PrefixCache:
        return NaiveCache(context, block_pages=48 // context.page_size)


def test_a_cache_of_coarser_blocks_leaves_the_remaining_tokens_to_its_caller():
    rig = CacheRig(lambda context: NaiveCache(context, block_pages=64), page_size=1)
    stored = rig.insert(rig.key(*range(100)))
    assert (stored.cached_pages, rig.cache.evictable_pages, len(stored.pages)) == (64, 64, 64)
    assert rig.cache.probe(rig.key(*range(63))) == 0
    assert rig.cache.probe(rig.key(*range(65))) == 64


def test_one_unlock_too_many_is_an_error():
    rig = CacheRig(NaiveCache, page_size=1)
    handle = rig.hold(rig.key(1))
    rig.cache.unlock(handle)
    with pytest.raises(InvariantError, match="is not locked"):
        rig.cache.unlock(handle)


def test_an_evicted_handle_is_refused():
    rig = CacheRig(NaiveCache, page_size=1)
    handle = rig.insert(rig.key(1)).handle
    rig.cache.evict(1)
    with pytest.raises(InvariantError, match="evicted"):
        rig.cache.lock(handle)
