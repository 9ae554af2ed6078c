"""`continuation`: what the built-in caches return to drafters."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.contracts import CacheContext, PrefixCache, PrefixKey
from graftlm.testing import CacheRig, NaiveCache
from graftlm.testing.window_cache_machine import FakeWindows
from graftlm_cache.chunk import ChunkCache
from graftlm_cache.hicache.create import create_hicache
from graftlm_cache.hicache.options import HicacheOptions
from graftlm_cache.radix import RadixCache
from graftlm_cache.swa_radix import SWARadixCache

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])


def swa_radix(context: CacheContext, held: set[int] | None = None) -> PrefixCache:
    windows = FakeWindows(3, held)
    return SWARadixCache(replace(context, window=windows), windows)


CACHES: dict[str, Callable[[CacheContext], PrefixCache]] = {
    "radix": RadixCache,
    "swa_radix": swa_radix,
    "hicache": lambda context: create_hicache(HicacheOptions(), context),
}
EACH_CACHE = pytest.mark.parametrize("name", CACHES)


def insert(rig: CacheRig, tokens, namespace: str = "") -> None:
    rig.insert(PrefixKey(np.array(tokens, dtype=np.int32), namespace))


def continuation(rig: CacheRig, tokens, num_tokens: int = 1000, namespace: str = "") -> list[int]:
    found = rig.cache.continuation(PrefixKey(np.array(tokens, dtype=np.int32), namespace), num_tokens)
    assert found.dtype == np.int32
    return found.tolist()


@EACH_CACHE
@PAGE_SIZES
def test_each_start_of_a_cached_key_is_continued(name, page_size):
    rig = CacheRig(CACHES[name], page_size)
    text = list(range(100, 100 + 3 * page_size))
    insert(rig, text)
    for length in range(len(text) + 1):
        assert continuation(rig, text[:length]) == text[length:]
        assert continuation(rig, text[:length], 2) == text[length : length + 2]
    assert continuation(rig, [*text, 7]) == []
    assert continuation(rig, [*text[:-1], 7]) == []
    assert continuation(rig, text[:1], namespace="tenant") == []


@EACH_CACHE
@PAGE_SIZES
def test_all_nodes_of_a_path_are_joined(name, page_size):
    rig = CacheRig(CACHES[name], page_size)
    text = list(range(6 * page_size))
    for num_pages in (1, 3, 6):
        insert(rig, text[: num_pages * page_size])
    assert continuation(rig, text[:1]) == text[1:]


@EACH_CACHE
def test_evicted_tokens_are_not_returned(name):
    rig = CacheRig(CACHES[name], 4)
    insert(rig, range(8))
    insert(rig, [*range(4), *range(90, 98)])
    rig.cache.match(PrefixKey(np.arange(8, dtype=np.int32)))
    rig.cache.evict(1)
    assert continuation(rig, range(4)) == [4, 5, 6, 7]
    rig.cache.evict(100)
    assert continuation(rig, range(4)) == []


def test_drafts_need_no_window_pages():
    rig = CacheRig(lambda context: swa_radix(context, held=set()), 4)
    insert(rig, range(32))
    assert rig.cache.probe(PrefixKey(np.arange(32, dtype=np.int32))) == 0
    assert continuation(rig, range(9)) == list(range(9, 32))


@pytest.mark.parametrize("make", [ChunkCache, NaiveCache])
def test_a_cache_without_an_own_implementation_returns_no_tokens(make):
    rig = CacheRig(make, 4)
    insert(rig, range(12))
    assert continuation(rig, range(4)) == []


TEXTS = st.lists(st.integers(0, 2), max_size=8)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(["radix", "hicache"]),
    page_size=st.sampled_from([1, 3]),
    used=st.lists(st.tuples(st.sampled_from(["", "tenant"]), TEXTS), min_size=1, max_size=8),
    asked=TEXTS,
    num_tokens=st.integers(1, 10),
)
def test_the_most_recently_used_key_is_followed(name, page_size, used, asked, num_tokens):
    rig = CacheRig(CACHES[name], page_size)
    latest: dict[str, list[list[int]]] = {"": [], "tenant": []}
    for namespace, text in used:
        insert(rig, text, namespace)
        latest[namespace].insert(0, text[: len(text) // page_size * page_size])
    for namespace, texts in latest.items():
        longer = [text for text in texts if len(text) > len(asked) and text[: len(asked)] == asked]
        found = continuation(rig, asked, num_tokens, namespace)
        if not longer:
            assert found == []
            continue
        expected = longer[0][len(asked) :][:num_tokens]
        assert found[: len(expected)] == expected
        whole = asked + found
        assert any(text[: len(whole)] == whole for text in texts)
