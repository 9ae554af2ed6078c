import numpy as np
import pytest

from graftlm.cache_sim import Simulator, TraceClock, parse_trace
from graftlm.contracts import CacheContext, EvictionContext
from graftlm.errors import PluginError
from graftlm.memory import PagePool
from graftlm.testing.naive_cache import NaiveCache

BLOCK = 4


class Rig:
    """A simulator with a registered cache, and the state that tests check."""

    def __init__(self, registry, capacity_pages, *, cache="radix", in_flight=0, page_size=BLOCK):
        self.clock = TraceClock()
        self.pool = PagePool(capacity_pages)
        eviction = registry.provider("eviction", "lru").create(
            registry.provider("eviction", "lru").options(), EvictionContext(capacity_pages, page_size)
        )
        provider = registry.provider("cache", cache)
        self.cache = provider.create(provider.options(), CacheContext(page_size, eviction, self.clock))
        ticks = iter(range(0, 10**9, 1000))
        self.simulator = Simulator(
            self.cache, self.pool, self.clock, BLOCK, page_size, in_flight, timer=lambda: next(ticks)
        )

    def run(self, trace):
        return self.simulator.run(trace.requests)

    @property
    def cached_pages(self):
        return self.cache.evictable_pages + self.cache.locked_pages


def test_hits_are_counted_in_tokens(make_trace, registry):
    replay = Rig(registry, 100).run(make_trace([1, 2, 3], [1, 2, 4], [5]))
    assert (replay.num_requests, replay.prompt_tokens, replay.hit_tokens) == (3, 28, 8)
    assert (replay.evicted_tokens, replay.bypassed_requests) == (0, 0)


def test_the_work_saved_by_a_hit_grows_with_its_depth(make_trace, registry):
    replay = Rig(registry, 10**4).run(make_trace(range(4096), range(4096)))  # 16,384 tokens
    hit, prompt = 4 * 4095, 4 * 4096
    assert replay.hit_tokens == hit
    assert replay.hit_cost == pytest.approx(hit * (1 + (hit - 1) / 2 / 8192))
    assert replay.prompt_cost == pytest.approx(2 * prompt * (1 + (prompt - 1) / 2 / 8192))


def test_the_last_token_of_a_prompt_is_never_a_hit(make_trace, registry):
    assert Rig(registry, 100).run(make_trace([1, 2], [1, 2])).hit_tokens == 4
    assert Rig(registry, 100, page_size=1).run(make_trace([1, 2], [1, 2])).hit_tokens == 7


def test_outputs_are_hits_of_later_prompts(registry):
    lines = [
        b'{"timestamp":0,"input_length":6,"output_length":7,"hash_ids":[1,2],"output_hash_ids":[3,4],"block_tokens":4}',
        b'{"timestamp":1,"input_length":13,"output_length":1,"hash_ids":[1,3,4,5],"output_hash_ids":[5],'
        b'"block_tokens":4}',
    ]
    assert Rig(registry, 100).run(parse_trace(lines, "here")).hit_tokens == 12


def test_entries_beyond_the_capacity_are_evicted(make_trace, registry):
    rig = Rig(registry, 3)
    replay = rig.run(make_trace([1, 2], [3, 4], [1, 2]))
    assert (replay.hit_tokens, replay.evicted_tokens) == (0, 16)
    assert rig.pool.num_free + rig.cached_pages == 3


def test_a_request_larger_than_the_capacity_bypasses_the_cache(make_trace, registry):
    rig = Rig(registry, 2)
    replay = rig.run(make_trace([1, 2], [1, 2, 3], [1, 2]))
    assert (replay.bypassed_requests, replay.num_requests, replay.prompt_tokens) == (1, 3, 28)
    assert (replay.hit_tokens, replay.evicted_tokens) == (4, 4)  # the last page is evicted for its own copy


def test_requests_in_flight_keep_their_pages_until_they_are_needed(make_trace, registry):
    rig = Rig(registry, 6, in_flight=2)
    replay = rig.run(make_trace([1, 2], [3, 4]))
    assert (rig.cache.locked_pages, rig.cache.evictable_pages, replay.evicted_tokens) == (4, 0, 0)

    rig = Rig(registry, 6, in_flight=2)
    replay = rig.run(make_trace([1, 2], [3, 4], [5, 6, 7]))  # the first request must end early
    assert (rig.cache.locked_pages, rig.cache.evictable_pages, replay.evicted_tokens) == (5, 0, 8)


def test_pages_that_the_cache_does_not_take_are_freed(make_trace, registry):
    rig = Rig(registry, 6, cache="chunk", in_flight=1)
    replay = rig.run(make_trace([1, 2], [1, 2], [1, 2, 3]))
    assert (replay.hit_tokens, replay.evicted_tokens, rig.pool.num_free) == (0, 0, 3)


def test_the_cache_sees_only_the_times_of_the_trace(make_trace, registry):
    rig = Rig(registry, 100)
    rig.run(make_trace([1], [2], [3]))
    assert sorted(node.stats.last_access for node in rig.cache.walk()) == [0.0, 1.0, 2.0]


def test_only_time_inside_the_cache_is_measured(make_trace, registry):
    replay = Rig(registry, 2).run(make_trace([1, 2], [3, 4]))
    # Each reading advances the clock by one tick: one span each for match, insert and evict, three for locks (lock,
    # move, unlock).
    assert (replay.match_ns, replay.insert_ns, replay.evict_ns, replay.lock_ns) == (2000, 2000, 1000, 6000)


class StuckCache(NaiveCache):
    """Evicts nothing."""

    def evict(self, num_pages):
        return np.empty(0, dtype=np.int32)


def test_a_cache_that_evicts_too_few_pages_is_an_error(make_trace, registry):
    rig = Rig(registry, 2)
    eviction = registry.provider("eviction", "lru")
    strategy = eviction.create(eviction.options(), EvictionContext(2, BLOCK))
    rig.simulator.cache = StuckCache(CacheContext(BLOCK, strategy, rig.clock))
    with pytest.raises(PluginError, match="should have evicted 2 pages, but evicted 0"):
        rig.run(make_trace([1, 2], [3, 4]))
