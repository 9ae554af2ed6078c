"""The copies that the hierarchical cache makes, their times, and the blocks that it offers to load."""

import weakref

import numpy as np
import pytest

from graftlm.contracts import CacheContext, PrefixKey
from graftlm.memory import TransferQueue
from graftlm.testing.recording import OldestAccessFirst, TickingClock
from graftlm_cache.hicache.create import create_hicache
from graftlm_cache.hicache.options import HicacheOptions

PAGE_SIZE, BLOCK_TOKENS = 2, 4
NO_SLOTS = np.empty(0, dtype=np.int64)


class Bench:
    """A cache with host memory for four blocks; prompts are lists of numbers."""

    def __init__(self, policy="write_through", num_blocks=4):
        self.queue = TransferQueue(16, "float32", PAGE_SIZE, lambda n, pages: np.zeros((n, pages * 16), dtype=np.uint8))
        options = HicacheOptions(host_tokens=num_blocks * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, write_policy=policy)
        context = CacheContext(PAGE_SIZE, OldestAccessFirst(), TickingClock(), transfer=self.queue)
        self.cache = create_hicache(options, context)

    def publish(self, key, *pages):
        ids = np.array(pages, dtype=np.int32)
        match = self.cache.match(key)
        self.cache.insert(key, ids[match.handle.num_pages :], match.handle)
        self.cache.store(key, ids)

    def run(self, *written_pages):
        """Plan a step that writes pages, and commit it; return its copies."""
        self.queue.begin_plan()
        copies = self.take(*written_pages)
        if copies is not None:
            self.queue.copies_done(copies)
            self.cache.copied(copies)
        return copies

    def take(self, *written_pages):
        return self.queue.take(np.array(written_pages, dtype=np.int64) * PAGE_SIZE)


def prompt(*tokens, namespace=""):
    return PrefixKey(np.array(tokens, dtype=np.int32), namespace)


EIGHT = prompt(*range(8))


def pages_of(copies):
    return [copy.pages.tolist() for copy in copies]


def test_blocks_are_stored_once_and_offered_after_the_copy():
    bench = Bench()
    bench.publish(EIGHT, 3, 5, 7, 9)
    assert bench.cache.find(EIGHT, 0) is None
    assert pages_of(bench.run(1).stores) == [[3, 5], [7, 9]]
    assert bench.cache.find(EIGHT, 0).num_pages == 4
    bench.cache.store(EIGHT, np.array([3, 5, 7, 9], dtype=np.int32))
    assert bench.run(1) is None


@pytest.mark.parametrize(
    ("num_pages", "expected"),
    [(0, [(0, 2), (0, 2)]), (1, [(1, 1), (0, 2)]), (2, [(0, 2)]), (3, [(1, 1)]), (4, [])],
)
def test_a_match_may_continue_in_the_middle_of_a_block(num_pages, expected):
    bench = Bench()
    bench.publish(EIGHT, 3, 5, 7, 9)
    bench.run(1)
    offer = bench.cache.find(EIGHT, num_pages)
    assert (offer is None) == (not expected)
    if offer is None:
        return
    assert offer.num_pages == 4 - num_pages
    given = np.arange(20, 20 + offer.num_pages, dtype=np.int32)
    assert bench.cache.load(offer, given).host == offer.num_pages
    loads = bench.run(1).loads
    assert [(copy.first_page, len(copy.pages)) for copy in loads] == expected
    assert np.concatenate([copy.pages for copy in loads]).tolist() == given.tolist()


def test_pages_that_are_evicted_before_their_copy_are_copied_before_the_overwrite():
    bench = Bench()
    bench.queue.begin_plan()
    bench.publish(prompt(*range(4)), 3, 5)  # by a row that is retracted while a step is planned
    assert set(bench.cache.evict(2).tolist()) == {3, 5}
    assert pages_of(bench.take(5).early_stores) == [[3, 5]]


def test_write_back_copies_a_block_when_its_last_page_is_evicted():
    bench = Bench("write_back")
    bench.publish(EIGHT, 3, 5, 7, 9)
    bench.publish(prompt(0, 1, 2, 3, 4, 5, 90, 91), 3, 5, 7, 11)  # shares a page of the second block
    assert bench.run(1) is None
    bench.queue.begin_plan()
    assert bench.cache.evict(1).tolist() == [9]
    assert pages_of(bench.take(9).early_stores) == [[7, 9]]
    assert sorted(bench.cache.evict(4).tolist()) == [3, 5, 7, 11]
    assert sorted(pages_of(bench.take(9).stores)) == [[3, 5], [7, 11]]


def test_selective_policy_stores_blocks_after_min_uses_requests():
    bench = Bench("write_through_selective")
    for expected in (None, [[3, 5], [7, 9]]):
        bench.cache.find(EIGHT, 0)
        bench.publish(EIGHT, 3, 5, 7, 9)
        copies = bench.run(1)
        assert (None if copies is None else pages_of(copies.stores)) == expected


def test_lost_copies_are_forgotten_and_their_slots_freed():
    bench = Bench(num_blocks=2)
    bench.publish(EIGHT, 3, 5, 7, 9)
    bench.run(1)
    bench.cache.load(bench.cache.find(EIGHT, 0), np.arange(4, dtype=np.int32))
    bench.publish(prompt(50, 51, 52, 53), 20, 21)
    assert bench.cache.tier_stats.skipped_stores == 1  # both slots are being read
    for copies in bench.queue.drop():
        bench.cache.copies_lost(copies)
    bench.publish(prompt(60, 61, 62, 63), 22, 23)
    bench.queue.begin_plan()
    for copies in bench.queue.drop():
        bench.cache.copies_lost(copies)
    assert bench.cache.find(prompt(60, 61, 62, 63), 0) is None
    assert bench.cache.tier_stats.lost_copies == 3


def test_reset_clears_host_memory_and_pending_blocks():
    for policy in ("write_through", "write_back"):
        bench = Bench(policy)
        bench.publish(EIGHT, 3, 5, 7, 9)
        bench.run(1)
        bench.cache.reset()
        assert bench.cache.find(EIGHT, 0) is None
        bench.cache.flush()
        assert bench.queue.take(NO_SLOTS) is None


def test_of_a_key_longer_than_host_memory_the_start_is_kept():
    bench = Bench(num_blocks=2)
    key = prompt(*range(16))
    bench.publish(key, *range(8))
    assert pages_of(bench.run(9).stores) == [[0, 1], [2, 3]]
    assert bench.cache.find(key, 0).num_pages == 4


def test_an_abandoned_cache_frees_host_memory():
    taken = []

    def allocate(num_blocks, pages):
        memory = np.zeros((num_blocks, pages * 16), dtype=np.uint8)
        taken.append(weakref.ref(memory))
        return memory

    queue = TransferQueue(16, "float32", PAGE_SIZE, allocate)
    options = HicacheOptions(host_tokens=16, block_tokens=BLOCK_TOKENS)
    cache = create_hicache(options, CacheContext(PAGE_SIZE, OldestAccessFirst(), TickingClock(), transfer=queue))
    assert taken[0]() is not None
    cache.abandon()
    assert taken[0]() is None
    assert cache.tier_stats.host_blocks == 0
