"""Allocation and release of window pages by the KV manager."""

import numpy as np
import pytest

from graftlm.contracts import CacheContext, PrefixKey
from graftlm.errors import InvariantError
from graftlm.memory import KVManager, PagePool, RequestTable, WindowPages, WindowSpan
from graftlm_cache.chunk import ChunkCache
from graftlm_cache.swa_radix import SWARadixCache
from graftlm_eviction.lru import LRU


def manager(num_pages=64, num_window_pages=32, window_tokens=5, page_size=1, num_rows=3, spare_tokens=0, reuse=True):
    window = WindowPages(num_pages, num_window_pages, WindowSpan(window_tokens, page_size, spare_tokens))
    context = CacheContext(page_size, LRU(), lambda: 0.0, window=window)
    cache = SWARadixCache(context, window) if reuse else ChunkCache(context)
    return KVManager(PagePool(num_pages), cache, RequestTable(num_rows, num_pages), page_size, window)


def key(num_tokens, first=0):
    return PrefixKey(np.arange(first, first + num_tokens, dtype=np.int32))


def admit(kv, tokens):
    row = kv.table.take_row(len(tokens.token_ids), 60)
    kv.attach(row, tokens)
    return row


def read(kv, row, tokens):
    """Plan one chunk: reserve pages, publish them, settle the step."""
    num_tokens = len(tokens.token_ids)
    assert kv.extend(row, num_tokens)
    kv.table.computed[row] = num_tokens
    kv.publish(row, tokens)
    kv.settle_step()
    kv.check()


def decode(kv, row, num_tokens):
    for _ in range(num_tokens):
        assert kv.reserve(np.array([row], dtype=np.int32), np.array([kv.table.computed[row] + 1]))
        kv.table.computed[row] += 1
        kv.settle_step()
        kv.check()


def test_a_decoding_row_keeps_only_its_window():
    kv = manager(reuse=False)
    row = admit(kv, key(3))
    read(kv, row, key(3))
    decode(kv, row, 30)
    assert kv.window.num_held == kv.window.reach_pages == 4
    kv.discard(row)
    assert (kv.window.num_held, kv.pool.num_free) == (0, 64)


def test_spare_tokens_before_the_window_are_kept():
    kv = manager(reuse=False, spare_tokens=3)
    row = admit(kv, key(3))
    decode(kv, row, 30)
    assert kv.window.num_held == 7


def test_a_row_unlocks_cached_windows_that_it_has_passed():
    kv = manager()
    row = admit(kv, key(10))
    read(kv, row, key(10))
    assert kv.cache.evictable_window_pages == 6
    for evictable in (7, 8, 9, 10, 10):
        decode(kv, row, 1)
        assert kv.cache.evictable_window_pages == evictable
    assert kv.cache.locked_pages == 10


def test_windows_are_unlocked_in_strides():
    kv = manager(window_tokens=13, num_window_pages=64)  # 12 pages before the window, unlocked 3 at a time
    row = admit(kv, key(20))
    read(kv, row, key(20))
    evictable = []
    for _ in range(13):
        decode(kv, row, 1)
        evictable.append(kv.cache.evictable_window_pages - 8)
    assert evictable == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12]


def test_a_later_request_can_continue_from_computed_tokens():
    kv = manager()
    row = admit(kv, key(10))
    read(kv, row, key(10))
    decode(kv, row, 20)
    kv.release(row, key(30))
    kv.check()
    assert kv.cache.probe(key(30)) == kv.cache.probe(key(40)) == 30
    assert kv.cache.probe(key(29)) == 10  # the window before it has been passed


def test_spare_tokens_allow_a_match_slightly_before_the_end():
    kv = manager(spare_tokens=2)
    row = admit(kv, key(10))
    read(kv, row, key(10))
    decode(kv, row, 20)
    kv.release(row, key(30))
    assert [kv.cache.probe(key(n)) for n in (30, 29, 28, 27)] == [30, 29, 28, 10]


def test_pages_of_a_step_are_not_freed_before_the_step_is_planned():
    kv = manager(num_pages=64, num_window_pages=20)
    row = admit(kv, key(12))
    assert kv.extend(row, 12)
    kv.table.computed[row] = 12
    kv.publish(row, key(12))
    assert kv.available_window_pages == 8
    kv.settle_step()
    assert kv.available_window_pages == 16


def test_window_pages_can_run_out_before_pages():
    kv = manager(num_pages=64, num_window_pages=12)
    row = admit(kv, key(20))
    assert not kv.extend(row, 13)
    assert kv.extend(row, 12)
    assert (kv.available_pages, kv.available_window_pages) == (52, 0)
    assert not kv.has_window_room(0, num_others=1)  # not even one page per row


def test_a_row_needs_pages_for_its_window_and_one_page_for_each_other_row():
    kv = manager(num_pages=64, num_window_pages=7)
    assert kv.has_window_room(100, num_others=1)
    admit(kv, key(20))
    assert kv.has_window_room(100, num_others=1)
    assert [kv.has_window_room(lacking, num_others=2) for lacking in (4, 5, 100)] == [True, False, False]


def test_a_single_row_continues_with_any_number_of_window_pages():
    kv = manager(num_pages=64, num_window_pages=2)
    assert kv.has_window_room(100, num_others=0)
    assert not kv.has_window_room(1, num_others=1)


def test_eviction_frees_pages_in_both_memories():
    kv = manager(num_pages=30, num_window_pages=14)
    for first in (0, 100):
        row = admit(kv, key(7, first))
        read(kv, row, key(7, first))
        kv.release(row, key(7, first))
    row = admit(kv, key(9, 200))
    read(kv, row, key(9, 200))
    assert kv.window.num_held == 4 + 9
    assert kv.usage.evictable == 7  # one prompt is left completely; of the other one, the last window is left
    assert kv.cache.probe(key(7, 100)) == 7
    decode(kv, row, 12)
    kv.check()


def test_recomputed_pages_get_window_pages_again():
    kv = manager()
    row = admit(kv, key(20))
    read(kv, row, key(20))
    kv.release(row, key(20))
    kv.window.free(kv.cache.evict_window(1).window_pages)
    assert kv.cache.probe(key(12)) == 0
    row = admit(kv, key(12))
    assert kv.table.computed[row] == 0
    read(kv, row, key(12))
    assert kv.pool.num_free == 64 - 20  # the row's own pages were duplicates
    kv.release(row, key(12))
    assert kv.cache.probe(key(12)) == 12
    assert kv.cache.probe(key(20)) == 20
    kv.check()


def test_reset_and_restart_free_all_window_pages():
    kv = manager()
    row = admit(kv, key(20))
    read(kv, row, key(20))
    kv.release(row, key(20))
    assert kv.reset() == 20
    assert kv.window.num_held == 0
    row = admit(kv, key(20))
    read(kv, row, key(20))
    fresh = manager().cache
    kv.restart(lambda: fresh)
    kv.check()
    assert kv.window.num_held == kv.usage.owned == 0
    assert kv.table.num_free_rows == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda kv: kv.window.free(np.array([0], dtype=np.int32)), "has_window is True"),
        (lambda kv: kv.window.free(np.array([13], dtype=np.int32)), "has no window page"),
        (lambda kv: kv.window.assign(np.array([10], dtype=np.int32)), "the cache and the rows count"),
        (lambda kv: kv.window.assign(np.array([40], dtype=np.int32)), "are free, but have"),
    ],
)
def test_inconsistent_window_page_counts_are_reported(spoil, message):
    kv = manager()
    row = admit(kv, key(10))
    read(kv, row, key(10))
    decode(kv, row, 6)
    kv.check()
    spoil(kv)
    with pytest.raises(InvariantError, match=message):
        kv.check()
