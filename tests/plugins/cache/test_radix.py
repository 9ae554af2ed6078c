import gc
import sys
from typing import ClassVar

import numpy as np
import pytest

from graftlm.contracts import NO_PAGES, CacheContext, EvictionStrategy, NodeStats, PrefixCache, PrefixKey
from graftlm.errors import InvariantError
from graftlm.testing import CacheRig, PrefixCacheConformance
from graftlm_cache.chunk import ChunkCache
from graftlm_cache.node import RadixNode
from graftlm_cache.radix import RadixCache

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])


class TestRadixCache(PrefixCacheConformance):
    max_examples = 40

    def create(self, context: CacheContext) -> PrefixCache:
        return RadixCache(context)


class FewestTokensFirst(EvictionStrategy):
    def priority(self, node: NodeStats) -> tuple[float, ...]:
        return (node.tokens,)


class CountingBytes(bytes):
    """The tokens of a key, which count how many of them are compared."""

    num_compared: ClassVar[int] = 0

    def startswith(self, run, offset=0):
        if len(run) <= len(self) - offset:
            CountingBytes.num_compared += len(run) // 4
        return super().startswith(run, offset)


class CountingTokens(np.ndarray):
    """Token ids whose bytes are counted."""

    def tobytes(self):
        return CountingBytes(super().tobytes())


def counting_key(num_tokens: int) -> PrefixKey:
    CountingBytes.num_compared = 0
    return PrefixKey(np.arange(num_tokens, dtype=np.int32).view(CountingTokens))


@PAGE_SIZES
def test_a_prompt_in_chunks_compares_each_token_at_most_once(page_size):
    rig = CacheRig(RadixCache, page_size)
    num_tokens, chunk = 4096, 64
    rig.insert(PrefixKey(np.arange(num_tokens, dtype=np.int32)))
    key = counting_key(num_tokens)
    handle = rig.hold(PrefixKey(key.token_ids[:0]))
    for end in range(chunk, num_tokens + 1, chunk):
        so_far = PrefixKey(key.token_ids[:end])
        rig.insert(so_far, handle)
        match = rig.cache.match(so_far, resume=handle)
        rig.cache.lock(match.handle)
        rig.cache.unlock(handle)
        handle = match.handle
    assert handle.num_pages * page_size == num_tokens
    # The tree's single run is longer than the rest of the key, so it is split without a comparison of the whole run.
    assert 0 < CountingBytes.num_compared <= num_tokens + chunk


@PAGE_SIZES
def test_chunks_of_a_new_prompt_compare_no_earlier_tokens(page_size):
    rig = CacheRig(RadixCache, page_size)
    key = counting_key(4096)
    handle = rig.hold(PrefixKey(key.token_ids[:0]))
    for end in range(64, 4097, 64):
        result = rig.insert(PrefixKey(key.token_ids[:end]), handle)
        rig.cache.lock(result.handle)
        rig.cache.unlock(handle)
        handle = result.handle
    assert handle.num_pages * page_size == 4096
    assert CountingBytes.num_compared == 0


def test_evicting_few_of_many_leaves_computes_few_priorities():
    rig = CacheRig(RadixCache, page_size=1)
    for letter in range(2000):
        rig.insert(rig.key(letter))
    rig.cache.evict(1)
    rig.strategy.num_priorities = 0
    for _ in range(50):
        rig.cache.match(rig.key(1999))
        rig.cache.evict(1)
    assert 0 < rig.strategy.num_priorities <= 2 * 50


def test_several_touches_between_evictions_cost_one_priority():
    rig = CacheRig(RadixCache, page_size=1)
    rig.insert(rig.key(1))
    for _ in range(100):
        rig.cache.match(rig.key(1))
    assert rig.strategy.num_priorities == 0
    rig.cache.evict(1)
    assert rig.strategy.num_priorities == 1


def test_removed_nodes_free_their_memory():
    gc.collect()
    num_before = num_nodes_in_memory()
    rig = CacheRig(RadixCache, page_size=1)
    for tenant in range(1000):
        rig.insert(rig.key(1, namespace=str(tenant)))
        rig.cache.evict(1)
        rig.cache.probe(rig.key(1, namespace=f"never seen {tenant}"))
        rig.cache.match(rig.key(1, namespace=f"never stored {tenant}"))
    gc.collect()
    assert num_nodes_in_memory() == num_before


def num_nodes_in_memory() -> int:
    return sum(type(thing) is RadixNode for thing in gc.get_objects())


def test_a_split_copies_so_that_an_evicted_half_frees_its_memory():
    rig = CacheRig(RadixCache, page_size=1)
    rig.insert(rig.key(*range(1000), namespace="split"))
    rig.insert(rig.key(0, 5, namespace="split"))
    rig.cache.evict(999)
    nodes = [node for node in gc.get_objects() if type(node) is RadixNode and node.namespace == "split"]
    nodes = [node for node in nodes if node.num_own_pages]
    assert len(nodes) == 2
    assert {sys.getsizeof(run) for node in nodes for run in (node.run, node.pages)} == {sys.getsizeof(bytes(4))}


def test_views_of_walk_cannot_change_the_tree():
    rig = CacheRig(RadixCache, page_size=4)
    rig.insert(rig.key(1, 2, 3))
    rig.insert(rig.key(1, 2, 4))
    for view in rig.cache.walk():
        with pytest.raises(ValueError, match="read-only"):
            view.token_ids[0] = 9
        with pytest.raises(ValueError, match="read-only"):
            view.pages[0] = 9


def test_a_path_of_many_nodes_needs_no_recursion():
    rig = CacheRig(RadixCache, page_size=1)
    letters = list(range(3000))
    handle = rig.hold(rig.key())
    for end in range(1, 3001):
        key = PrefixKey(np.arange(end, dtype=np.int32))
        handle = rig.insert(key, handle).handle
    rig.cache.lock(handle)
    assert (rig.cache.locked_pages, sum(1 for _ in rig.cache.walk())) == (3000, 3000)
    rig.cache.unlock(handle)
    assert rig.cache.probe(rig.key(*letters)) == 3000
    assert len(rig.cache.evict(1000)) == 1000
    assert len(rig.cache.reset()) == 2000


def test_the_upper_half_of_a_split_starts_with_the_stats_of_the_whole():
    rig = CacheRig(RadixCache, page_size=4)
    rig.insert(rig.key(1, 2, 3, priority=2))
    rig.cache.match(rig.key(1, 2, 3))
    (whole,) = rig.cache.walk()
    rig.insert(rig.key(1, 9))
    upper, lower = (view.stats for view in rig.views_of(whole.pages))
    assert lower is whole.stats
    assert (upper.hits, upper.priority, upper.created) == (2, 2, lower.created)
    assert (upper.depth, upper.tokens, lower.depth, lower.tokens) == (0, 4, 4, 8)
    assert upper.last_access > lower.last_access


def test_an_unlock_without_a_lock_is_an_error_even_below_a_lock():
    rig = CacheRig(RadixCache, page_size=1)
    rig.insert(rig.key(1, 2))
    upper, _lower = rig.hold(rig.key(1)), rig.hold(rig.key(1, 2))
    rig.cache.unlock(upper)
    with pytest.raises(InvariantError, match="not locked"):
        rig.cache.unlock(upper)
    assert rig.cache.locked_pages == 2


def test_the_handle_of_an_evicted_node_is_refused():
    rig = CacheRig(RadixCache, page_size=1)
    handle = rig.insert(rig.key(1, 2)).handle
    rig.cache.evict(2)
    for use in (
        lambda: rig.cache.lock(handle),
        lambda: rig.cache.unlock(handle),
        lambda: rig.cache.match(rig.key(1, 2, 3), resume=handle),
        lambda: rig.insert(rig.key(1, 2, 3), handle),
    ):
        with pytest.raises(InvariantError, match="was evicted"):
            use()


def test_a_handle_of_another_cache_class_is_refused():
    stranger = CacheRig(ChunkCache, page_size=1)
    rig = CacheRig(RadixCache, page_size=1)
    with pytest.raises(InvariantError, match="expected one that this cache returned"):
        rig.cache.lock(stranger.hold(stranger.key(1)))


def test_a_handle_of_another_namespace_is_refused():
    rig = CacheRig(RadixCache, page_size=1)
    handle = rig.insert(rig.key(1)).handle
    with pytest.raises(InvariantError, match="namespace"):
        rig.cache.match(rig.key(1, 2, namespace="tenant"), resume=handle)


@pytest.mark.parametrize(
    ("token_ids", "pages", "message"),
    [
        (np.arange(8, dtype=np.int64), np.arange(2, dtype=np.int32), "expected int32 token ids"),
        (np.zeros((2, 4), dtype=np.int32), np.arange(2, dtype=np.int32), "expected int32 token ids"),
        (np.arange(8, dtype=np.int32), np.arange(3, dtype=np.int32), "got 3 pages .* expected 2 pages"),
        (np.arange(8, dtype=np.int32), NO_PAGES, "got 0 pages .* expected 2 pages"),
    ],
)
def test_a_malformed_insert_is_refused_and_changes_nothing(token_ids, pages, message):
    rig = CacheRig(RadixCache, page_size=4)
    start = rig.cache.match(rig.key()).handle
    with pytest.raises(InvariantError, match=message):
        rig.cache.insert(PrefixKey(token_ids), pages, start)
    assert rig.cached_pages() == []


def test_one_eviction_does_not_recompute_all_priorities():
    rig = CacheRig(RadixCache, page_size=1)
    for letter in range(2000):
        rig.insert(rig.key(letter))
    rig.strategy.num_priorities = 0
    rig.cache.evict(1)
    assert rig.strategy.num_priorities < 300


def test_the_lower_half_of_a_split_gets_a_new_priority():
    rig = CacheRig(RadixCache, page_size=4, inner_strategy=FewestTokensFirst())
    long = rig.insert(rig.key(1, 2, 3, 4)).pages
    short = rig.insert(rig.key(5, 6)).pages
    rig.insert(rig.key(7))
    rig.cache.evict(1)
    rig.cache.match(rig.key(1, 2, 3))
    assert [rig.cache.evict(1).tolist() for _ in range(3)] == [long[3:].tolist(), short.tolist(), long[:3].tolist()]


def test_the_eviction_age_is_that_of_the_last_evicted_leaf():
    rig = CacheRig(RadixCache, page_size=4)
    for letter in (1, 2, 3):
        rig.insert(rig.key(letter))
    used_s = [node.stats.last_access for node in rig.cache.walk()]
    assert rig.cache.eviction_age_s is None
    rig.cache.evict(2)
    age_s = rig.clock.now - sorted(used_s)[1]
    assert rig.cache.eviction_age_s == age_s
    rig.cache.reset()
    assert rig.cache.eviction_age_s == age_s  # a flush is not an eviction
