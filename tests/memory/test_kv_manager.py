import numpy as np
import pytest

from graftlm.contracts import CacheContext, PrefixKey
from graftlm.errors import InvariantError
from graftlm.memory import KVManager, PagePool, RequestTable
from graftlm_cache.radix import RadixCache
from graftlm_eviction.lru import LRU


def manager(num_pages=16, page_size=4, num_rows=3):
    cache = RadixCache(CacheContext(page_size, LRU(), lambda: 0.0))
    return KVManager(PagePool(num_pages), cache, RequestTable(num_rows, num_pages), page_size)


def key(num_tokens, first=0):
    return PrefixKey(np.arange(first, first + num_tokens, dtype=np.int32))


def reserve(kv, row, num_tokens):
    return kv.reserve(np.array([row], dtype=np.int32), np.array([num_tokens]))


def test_reserve_gives_each_row_only_the_missing_pages():
    kv = manager()
    rows = np.array([kv.table.take_row(9, 20), kv.table.take_row(4, 20)], dtype=np.int32)
    for row in rows:
        kv.attach(row, key(0))
    assert kv.reserve(rows, np.array([9, 4]))
    assert kv.table.num_pages[rows].tolist() == [3, 1]
    assert kv.reserve(rows, np.array([12, 5]))
    assert kv.table.num_pages[rows].tolist() == [3, 2]
    held = [kv.table.page_table[row, : kv.table.num_pages[row]].tolist() for row in rows]
    assert len(set(held[0] + held[1])) == 5
    kv.check()


def test_a_row_with_surplus_pages_does_not_take_pages_of_others():
    kv = manager()
    rows = np.array([kv.table.take_row(9, 20), kv.table.take_row(4, 20)], dtype=np.int32)
    for row in rows:
        kv.attach(row, key(0))
    assert kv.reserve(rows, np.array([9, 4]))
    assert kv.reserve(rows, np.array([8, 5]))  # the first one has been rewritten into fewer tokens
    assert kv.table.num_pages[rows].tolist() == [3, 2]
    assert kv.reserve(rows, np.array([8, 13]))
    assert kv.table.num_pages[rows].tolist() == [3, 4]
    kv.check()


def test_a_reservation_beyond_the_memory_changes_nothing():
    kv = manager(num_pages=4)
    row = kv.table.take_row(30, 40)
    kv.attach(row, key(0))
    assert not reserve(kv, row, 17)
    assert kv.table.num_pages[row] == 0
    assert kv.pool.num_free == 4


def test_another_row_finds_published_pages_and_both_read_them():
    kv = manager()
    a, b = kv.table.take_row(10, 20), kv.table.take_row(10, 20)
    kv.attach(a, key(9))
    reserve(kv, a, 10)
    kv.publish(a, key(10))
    assert kv.attach(b, key(9)).num_tokens == 8
    assert kv.table.page_table[b, :2].tolist() == kv.table.page_table[a, :2].tolist()
    assert kv.usage.locked == 2
    kv.check()


def test_a_row_that_computed_published_tokens_frees_its_copies():
    kv = manager()
    a, b = kv.table.take_row(10, 20), kv.table.take_row(10, 20)
    for row in (a, b):
        kv.attach(row, key(0))
        reserve(kv, row, 10)
    kv.publish(a, key(10))
    kv.publish(b, key(10))
    assert kv.table.page_table[b, :2].tolist() == kv.table.page_table[a, :2].tolist()
    assert kv.table.page_table[b, 2] != kv.table.page_table[a, 2]
    assert (kv.usage.locked, kv.usage.owned, kv.usage.free) == (2, 2, 12)
    kv.check()


def test_advance_skips_tokens_that_another_row_has_published():
    kv = manager()
    a, b = kv.table.take_row(16, 20), kv.table.take_row(16, 20)
    for row in (a, b):
        kv.attach(row, key(0))
    reserve(kv, b, 3)
    kv.table.computed[b] = 3
    reserve(kv, a, 16)
    kv.publish(a, key(16))
    assert kv.advance(b, key(15)) == 9
    assert kv.table.computed[b] == 12
    assert kv.advance(b, key(15)) == 0
    kv.check()


def test_pages_of_released_rows_stay_cached_until_they_are_needed():
    kv = manager(num_pages=4)
    a = kv.table.take_row(10, 16)
    kv.attach(a, key(0))
    reserve(kv, a, 10)
    kv.release(a, key(10))
    assert (kv.usage.free, kv.usage.evictable, kv.available_pages) == (2, 2, 4)
    b = kv.table.take_row(16, 16)
    assert kv.attach(b, key(15, first=100)).num_tokens == 0
    assert reserve(kv, b, 16)
    assert kv.evicted_pages == 2
    kv.check()


def test_discarded_rows_free_all_their_pages():
    kv = manager()
    a = kv.table.take_row(10, 16)
    kv.attach(a, key(0))
    reserve(kv, a, 10)
    kv.discard(a)
    assert kv.usage.free == 16
    assert kv.table.num_free_rows == 3


def test_a_restart_gives_empty_memory():
    kv = manager()
    a = kv.table.take_row(10, 16)
    kv.attach(a, key(0))
    reserve(kv, a, 10)
    kv.restart(lambda: RadixCache(CacheContext(4, LRU(), lambda: 0.0)))
    assert kv.usage.free == kv.usage.total == 16
    assert kv.table.num_free_rows == 3
    kv.check()


def lose(kv, row):
    kv.table.num_pages[row] -= 1


def share(kv, row):
    kv.table.page_table[row, 0] = kv.table.page_table[row, 1]


def free_too_early(kv, row):
    kv.pool.free(kv.table.page_table[row, :1].copy())


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lose, "2: no owner"), (share, "0: no owner; 1: row 0"), (free_too_early, "0: free list and row 0")],
)
def test_a_page_without_exactly_one_owner_is_reported(damage, message):
    kv = manager()
    row = kv.table.take_row(10, 16)
    kv.attach(row, key(0))
    reserve(kv, row, 10)
    kv.check()
    damage(kv, row)
    with pytest.raises(InvariantError, match=message):
        kv.check()


def test_a_cache_with_wrong_counters_is_reported():
    kv = manager()
    row = kv.table.take_row(10, 16)
    kv.attach(row, key(0))
    reserve(kv, row, 10)
    kv.publish(row, key(10))
    kv.cache._evictable_pages += 1
    with pytest.raises(InvariantError, match="prefix cache: nodes have 2 pages, counters have 1 evictable"):
        kv.check()


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 5, 9, 64])
def test_extending_one_row_equals_reserving_for_it(num_tokens):
    extended, reserved = manager(), manager()
    for kv in (extended, reserved):
        kv.attach(kv.table.take_row(64, 64), key(0))
    for more in (num_tokens, num_tokens + 3):
        fits = extended.extend(0, more)
        assert fits == reserve(reserved, 0, more)
        assert extended.table.page_table.tolist() == reserved.table.page_table.tolist()
        assert extended.usage == reserved.usage
        extended.check()
