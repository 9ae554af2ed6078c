from dataclasses import replace
from typing import ClassVar

import pytest

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.errors import InvariantError
from graftlm.testing import CacheRig, PrefixCacheConformance, WindowCacheConformance
from graftlm.testing.cache_rig import as_list
from graftlm.testing.window_cache_machine import FakeWindows
from graftlm_cache.swa_radix import SWARadixCache


def create(context: CacheContext) -> SWARadixCache:
    assert context.window is not None
    return SWARadixCache(context, context.window)


def make_rig(reach_pages: int) -> CacheRig:
    return CacheRig(lambda context: create(replace(context, window=FakeWindows(reach_pages))), 1)


@pytest.mark.few(page_size=2)
class TestSWARadixCacheWithEveryWindowPage(PrefixCacheConformance):
    def create(self, context: CacheContext) -> PrefixCache:
        return create(replace(context, window=FakeWindows(3)))


class TestSWARadixCacheWithoutReach(PrefixCacheConformance):
    parameters: ClassVar = {"page_size": (1, 4)}

    def create(self, context: CacheContext) -> PrefixCache:
        return create(replace(context, window=FakeWindows(0, set())))


@pytest.mark.covering(strength=1)
class TestSWARadixCacheWithWindows(WindowCacheConformance):
    def create(self, context: CacheContext) -> PrefixCache:
        return create(context)


def test_of_a_long_run_the_part_before_the_last_window_is_evicted_first():
    rig = make_rig(reach_pages=3)
    key = rig.key(*range(1, 11))
    rig.insert(key)
    gone = rig.cache.evict_window(1)
    assert (as_list(gone.pages), as_list(gone.window_pages)) == ([], list(range(7)))
    assert rig.cache.probe(key) == 10
    assert rig.cache.probe(rig.key(*range(1, 10))) == 0
    assert rig.cache.evictable_window_pages == 3


def test_a_leaf_without_its_window_is_evicted_with_its_bare_part():
    rig = make_rig(reach_pages=3)
    rig.insert(rig.key(*range(1, 11)))
    rig.cache.evict_window(1)
    gone = rig.cache.evict_window(1)
    assert (sorted(as_list(gone.pages)), as_list(gone.window_pages)) == (list(range(10)), [])
    assert rig.cached_pages() == []
    rig.check_mirror()


def test_eviction_includes_the_bare_nodes_that_it_leaves():
    rig = make_rig(reach_pages=3)
    rig.insert(rig.key(*range(1, 11)))
    rig.cache.evict_window(1)
    assert sorted(as_list(rig.cache.evict(1))) == list(range(10))


def test_a_branch_keeps_the_bare_run_before_it():
    rig = make_rig(reach_pages=2)
    rig.insert(rig.key(1, 2, 3, 4, 5, 6))
    rig.insert(rig.key(1, 2, 3, 4, 8, 9))
    for _ in range(2):
        rig.cache.evict_window(2)  # the first part of the trunk, then its last window
    assert rig.cache.probe(rig.key(1, 2, 3, 4)) == 0
    assert rig.cache.probe(rig.key(1, 2, 3, 4, 5, 6)) == rig.cache.probe(rig.key(1, 2, 3, 4, 8, 9)) == 6


def test_the_most_recently_used_window_is_evicted_last():
    rig = make_rig(reach_pages=1)
    for letter in (1, 2, 3):
        rig.insert(rig.key(letter))
    handle = rig.hold(rig.key(1))
    rig.cache.lock_window(handle, 1)
    rig.cache.unlock_window(handle, 1)
    rig.cache.unlock(handle)
    assert [as_list(rig.cache.evict_window(1).pages) for _ in range(3)] == [[1], [2], [0]]


def test_an_unlock_window_without_a_lock_is_an_error():
    rig = make_rig(reach_pages=2)
    rig.insert(rig.key(1, 2, 3))
    handle = rig.hold(rig.key(1, 2, 3))
    with pytest.raises(InvariantError, match="not locked"):
        rig.cache.unlock_window(handle, 2)


def test_a_pinned_prefix_keeps_its_last_window_longest():
    rig = make_rig(reach_pages=1)
    rig.insert(rig.key(1, 2))
    rig.cache.pin(rig.key(1, 2), 1000.0)
    rig.insert(rig.key(3))
    assert as_list(rig.cache.evict_window(1).window_pages) == [0]
    assert as_list(rig.cache.evict_window(1).pages) == [2]
    assert rig.cache.probe(rig.key(1, 2)) == 2
    assert as_list(rig.cache.evict_window(1).pages) == [1, 0]
