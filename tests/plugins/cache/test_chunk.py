import pytest

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.errors import InvariantError
from graftlm.testing import CacheRig, PrefixCacheConformance
from graftlm_cache.chunk import ChunkCache


class TestChunkCache(PrefixCacheConformance):
    reuses = False
    max_examples = 5

    def create(self, context: CacheContext) -> PrefixCache:
        return ChunkCache(context)


def test_pages_stay_with_the_caller():
    rig = CacheRig(ChunkCache, page_size=4)
    result = rig.insert(rig.key(1, 2, 3))
    assert (result.existing_pages, result.cached_pages, result.handle.num_pages) == (0, 0, 0)
    assert rig.matched(rig.key(1, 2, 3)) == []
    assert rig.cache.probe(rig.key(1, 2, 3)) == rig.cache.version == 0


def test_an_unlock_without_a_lock_is_an_error():
    rig = CacheRig(ChunkCache, page_size=4)
    handle = rig.hold(rig.key(1))
    rig.cache.unlock(handle)
    with pytest.raises(InvariantError, match="without a lock"):
        rig.cache.unlock(handle)
