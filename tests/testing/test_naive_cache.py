import pytest

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.errors import InvariantError
from graftlm.testing import CacheRig, NaiveCache, PrefixCacheConformance


class TestNaiveCache(PrefixCacheConformance):
    def create(self, context: CacheContext) -> PrefixCache:
        return NaiveCache(context)


def test_one_unlock_too_many_is_an_error():
    rig = CacheRig(NaiveCache, page_size=1)
    handle = rig.hold(rig.key(1))
    rig.cache.unlock(handle)
    with pytest.raises(InvariantError, match="nobody holds"):
        rig.cache.unlock(handle)


def test_an_evicted_handle_is_refused():
    rig = CacheRig(NaiveCache, page_size=1)
    handle = rig.insert(rig.key(1)).handle
    rig.cache.evict(1)
    with pytest.raises(InvariantError, match="evicted"):
        rig.cache.lock(handle)
