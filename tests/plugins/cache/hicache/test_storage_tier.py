"""Blocks are written to storage and read back outside the scheduler; faults of storage only cost speed."""

import threading

import numpy as np
import pytest

from graftlm.contracts import KVStorage, StorageStats
from graftlm_cache.hicache.host_tier import HostTier
from graftlm_cache.hicache.storage_tier import StorageTier, is_finite

KEYS = [bytes([i]) * 32 for i in range(8)]


class Shelf(KVStorage):
    """Keeps blocks in a dictionary; `gate` delays its reads and writes."""

    def __init__(self, blocks=(), error=None):
        self.blocks = {key: np.full(8, i, dtype=np.uint8) for i, key in enumerate(blocks)}
        self.error = error
        self.gate = threading.Event()
        self.gate.set()
        self.is_closed = False

    def contains(self, keys):
        self.gate.wait(10)
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def get(self, key, out):
        if self.error:
            raise self.error
        out[:] = self.blocks[key]
        return True

    def put(self, key, data):
        self.gate.wait(10)
        if self.error:
            raise self.error
        self.blocks[key] = data.copy()
        return True

    def clear(self):
        self.blocks.clear()

    def stats(self):
        return StorageStats(num_blocks=len(self.blocks))

    def close(self):
        self.is_closed = True


def make(shelf, num_slots=4, dtype="float32", **settings):
    host = HostTier(np.zeros((num_slots, 8), dtype=np.uint8))
    return StorageTier(shelf, host, dtype, **settings), host


def filled(host, key, content=1):
    block = host.reserve(key)
    host.memory[block.slot] = content
    host.fill(block)
    host.unpin(block)
    return block


def num_pinned(host):
    return sum(block.num_pins for block in host._by_slot.values())


def test_a_prefetch_reads_stored_blocks_from_the_first_one_on():
    tier, host = make(Shelf(KEYS[:3]))
    filled(host, KEYS[0], content=9)
    prefetch = tier.prefetch(KEYS[:2] + KEYS[3:], None)
    prefetch.ended.result(10)
    assert [block.key for block in prefetch.blocks] == KEYS[:2]
    assert host.memory[prefetch.blocks[1].slot].tolist() == [1] * 8
    assert [block.from_storage for block in prefetch.blocks] == [False, True]
    assert num_pinned(host) == 2
    tier.release(prefetch)
    assert num_pinned(host) == 0
    tier.close()


def test_prefetches_use_at_most_half_of_host_memory():
    tier, _host = make(Shelf(KEYS), num_slots=4)
    first, second = tier.prefetch(KEYS[:5], None), tier.prefetch(KEYS[5:], None)
    for prefetch in (first, second):
        prefetch.ended.result(10)
    assert (len(first.blocks), len(second.blocks)) == (2, 0)
    tier.release(first)
    third = tier.prefetch(KEYS[5:], None)
    third.ended.result(10)
    assert len(third.blocks) == 2
    tier.close()


def test_a_prefetch_released_while_it_runs_leaves_no_pin():
    shelf = Shelf(KEYS)
    shelf.gate.clear()
    tier, host = make(shelf)
    prefetch = tier.prefetch(KEYS, None)
    called = threading.Event()
    prefetch.when_done(called.set)
    assert not prefetch.done
    tier.release(prefetch)
    shelf.gate.set()
    assert called.wait(10)
    assert num_pinned(host) == 0
    tier.close()


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("bug")])
def test_a_storage_that_raises_is_counted_and_leaves_no_pin(error, caplog):
    tier, host = make(Shelf(KEYS, error))
    prefetch = tier.prefetch(KEYS, None)
    prefetch.ended.result(10)
    tier.write(filled(host, KEYS[0]))
    assert prefetch.blocks == []
    tier.close()
    assert tier.stats().failures == 2
    assert num_pinned(host) == 0
    assert len(caplog.records) == 1


def test_close_finishes_the_current_write():
    shelf = Shelf()
    tier, host = make(shelf)
    tier.write(filled(host, KEYS[0]))
    tier.close()
    assert shelf.is_closed
    assert list(shelf.blocks) == KEYS[:1]


def test_writes_to_a_slow_storage_occupy_at_most_half_of_host_memory():
    shelf = Shelf()
    shelf.gate.clear()
    tier, host = make(shelf, num_slots=4)
    blocks = [filled(host, key) for key in KEYS[:4]]
    for block in blocks:
        tier.write(block)
    assert (num_pinned(host), tier.num_skipped) == (2, 2)
    tier.write_everything()
    tier.write(blocks[3])
    shelf.gate.set()
    tier.close()
    assert set(shelf.blocks) == {*KEYS[:2], KEYS[3]}


def test_blocks_with_non_finite_numbers_are_not_written():
    shelf = Shelf()
    tier, host = make(shelf)
    block = filled(host, KEYS[0])
    host.memory[block.slot].view(np.float32)[1] = np.nan
    tier.write(block)
    tier.close()
    assert shelf.blocks == {}
    assert tier.num_skipped == 1


@pytest.mark.parametrize(
    ("dtype", "bits", "expected"),
    [
        ("float32", np.array([0x7F7F_FFFF], "<u4"), True),
        ("float32", np.array([0x7F80_0000], "<u4"), False),
        ("float16", np.array([0x7BFF], "<u2"), True),
        ("float16", np.array([0xFE00], "<u2"), False),
        ("bfloat16", np.array([0xFF7F], "<u2"), True),
        ("bfloat16", np.array([0x7FC0], "<u2"), False),
        ("float8_e4m3fn", np.array([0x7F], "u1"), True),  # an unknown dtype cannot be checked
    ],
)
def test_a_number_with_all_exponent_bits_is_not_finite(dtype, bits, expected):
    assert is_finite(bits.view(np.uint8), dtype) is expected


def threads_of_storage():
    return {thread for thread in threading.enumerate() if thread.name.startswith("graftlm-kv")}


def test_close_does_not_wait_for_a_hanging_storage(caplog):
    shelf = Shelf()
    shelf.gate.clear()
    before = threads_of_storage()
    tier, host = make(shelf, num_slots=8, close_timeout_s=0.05)
    prefetch = tier.prefetch(KEYS[:1], None)
    for key in KEYS[1:3]:
        tier.write(filled(host, key))
    tier.close()
    assert "it is abandoned, and 2 blocks are not written" in caplog.text
    assert not shelf.is_closed
    ours = threads_of_storage() - before
    assert all(thread.daemon for thread in ours), "none keeps the interpreter from ending"
    shelf.gate.set()
    prefetch.ended.result(10)
    for thread in ours:
        thread.join(10)
    assert len(shelf.blocks) <= 1, "what waited is not written any more"
    assert shelf.is_closed
    assert tier.prefetch(KEYS[:1], None).done


def test_close_waits_for_a_slow_storage():
    class Slow(Shelf):
        def put(self, key, data):
            threading.Event().wait(0.1)
            return super().put(key, data)

    shelf = Slow()
    tier, host = make(shelf, num_slots=8, close_timeout_s=0.25)
    tier.write_everything()
    for key in KEYS[:5]:
        tier.write(filled(host, key))
    tier.close()
    assert (len(shelf.blocks), shelf.is_closed) == (5, True)


def test_abandon_does_not_wait_for_writes():
    shelf = Shelf()
    shelf.gate.clear()
    tier, host = make(shelf, num_slots=8)
    for key in KEYS[:3]:
        tier.write(filled(host, key))
    tier.abandon()
    shelf.gate.set()
    tier.close()
    assert len(shelf.blocks) <= 1
    assert shelf.is_closed
