"""The conformance kit for KV storages."""

import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import KVStorage, StorageContext
from graftlm.testing.conformance import Conformance

__all__ = ["KVStorageConformance"]

_KEYS = (b"a", b"\0", b"\0\0", b"../a", b"A", bytes(16), bytes(range(32)), bytes(200))


class KVStorageConformance(Conformance, ABC):
    """The kit for the contract `KVStorage`.

        class TestMyStorage(KVStorageConformance):
            def create(self, context):
                return MyStorage(context, self.medium)

    The kit uses new random fingerprints, so the medium may already contain other blocks. The contract `KVStorage` has
    no methods for the actions of `create_limited`, `damage` and `break_medium`. If you do not override one of these
    methods, the tests that use it are skipped.

    Attributes:
        parameters: `block_bytes` is the number of bytes in a block.
        damages: kinds of damage that `damage` supports.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"block_bytes": (1, 1000, 65_537)}
    damages: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def create(self, context: StorageContext) -> KVStorage:
        """Return a new storage. All storages of one test must use the same medium."""

    def create_limited(self, context: StorageContext, num_blocks: int) -> KVStorage:
        """Return a storage with a new, empty medium and a size limit of `num_blocks` blocks."""
        raise SkipTest("the kit cannot set a size limit: it does not override create_limited()")

    def damage(self, name: str, context: StorageContext, key: bytes) -> None:
        """Damage the stored block of a key; `name` is one of `damages`."""
        raise SkipTest("the kit cannot damage a block: it does not override damages and damage()")

    def break_medium(self) -> None:
        """Make all later operations on the medium fail."""
        raise SkipTest("the kit cannot break the medium: it does not override break_medium()")

    @cached_property
    def fingerprint(self) -> bytes:
        """The test's fingerprint, 24 random bytes."""
        return secrets.token_bytes(24)

    def context(self, block_bytes: int = 1000) -> StorageContext:
        """Return a context with the test's fingerprint."""
        return StorageContext(self.fingerprint, block_bytes)

    def test_get_fills_in_exactly_what_was_put(self, block_bytes: int) -> None:
        """`get` fills `out` with exactly the bytes that were passed to `put` with the same key."""
        storage = self.create(self.context(block_bytes))
        for key in _KEYS:
            assert storage.put(key, _block(key, block_bytes)) is True, f"put({key!r}) was refused"
        for key in reversed(_KEYS):
            _assert_held(storage, key, block_bytes)
        storage.close()

    def test_a_block_that_was_never_put_is_a_miss(self, block_bytes: int) -> None:
        """`get` of a key that is not stored returns False and is counted as a miss."""
        storage = self.create(self.context(block_bytes))
        storage.put(b"other", _block(b"other", block_bytes))
        before = storage.stats()
        assert storage.get(b"key", np.empty(block_bytes, np.uint8)) is False
        assert storage.stats() == replace(before, misses=before.misses + 1)
        storage.close()

    def test_a_block_that_is_held_is_not_written_again(self, block_bytes: int) -> None:
        """`put` of a block that is already stored does not write it again, and returns True."""
        storage = self.create(self.context(block_bytes))
        storage.put(b"key", _block(b"key", block_bytes))
        before = storage.stats()
        assert storage.put(b"key", _block(b"key", block_bytes)) is True
        assert storage.stats().stored == before.stored == 1
        assert storage.stats().num_blocks == before.num_blocks == 1
        storage.close()

    def test_the_storage_keeps_copies(self, block_bytes: int) -> None:
        """Changes to the arrays after `put` and `get` do not change the stored blocks."""
        storage = self.create(self.context(block_bytes))
        data = _block(b"key", block_bytes)
        storage.put(b"key", data)
        data ^= 255
        out = np.empty(block_bytes, np.uint8)
        storage.get(b"key", out)
        out ^= 255
        _assert_held(storage, b"key", block_bytes)
        storage.close()

    def test_arrays_may_be_read_only_or_views(self, block_bytes: int) -> None:
        """`put` accepts contiguous read-only views, and `get` fills contiguous views."""
        storage = self.create(self.context(block_bytes))
        data = np.stack([_block(b"one", block_bytes), _block(b"two", block_bytes)])
        data.flags.writeable = False
        storage.put(b"two", data[1])
        out = np.zeros((3, block_bytes), np.uint8)
        assert storage.get(b"two", out[1])
        assert np.array_equal(out[1], data[1])
        assert not out[0].any(), "get() wrote outside of its block"
        assert not out[2].any(), "get() wrote outside of its block"
        storage.close()

    def test_contains_counts_from_the_front(self) -> None:
        """`contains` returns the number of leading keys that are stored; the first missing key ends the count."""
        storage = self.create(self.context())
        for key in (b"1", b"2", b"4"):
            storage.put(key, _block(key, 1000))
        cases = {(): 0, (b"1",): 1, (b"1", b"2", b"3", b"4"): 2, (b"3", b"1"): 0, (b"4", b"2", b"1"): 3}
        for keys, count in cases.items():
            assert storage.contains(keys) == count, f"contains({keys}) is {storage.contains(keys)}, expected {count}"
        storage.close()

    def test_stats_add_up(self) -> None:
        """`stats` returns the correct numbers of hits, misses, writes, stored blocks and bytes."""
        storage = self.create(self.context())
        out = np.empty(1000, np.uint8)
        for key in (b"1", b"2", b"3"):
            storage.put(key, _block(key, 1000))
        for key in (b"1", b"2", b"1", b"4"):
            storage.get(key, out)
        stats = storage.stats()
        assert (stats.num_blocks, stats.stored, stats.hits, stats.misses) == (3, 3, 3, 1), f"got {stats}"
        assert stats.num_bytes >= 3 * 1000
        assert (stats.evicted, stats.corrupt, stats.foreign, stats.failures) == (0, 0, 0, 0), f"got {stats}"
        storage.close()

    def test_what_was_stored_outlives_the_storage(self, block_bytes: int) -> None:
        """A new storage with the same medium and fingerprint has the blocks that were stored before."""
        first = self.create(self.context(block_bytes))
        for key in _KEYS:
            first.put(key, _block(key, block_bytes))
        first.close()
        second = self.create(self.context(block_bytes))
        assert second.stats().num_blocks == len(_KEYS)
        assert second.contains(_KEYS) == len(_KEYS)
        for key in _KEYS:
            _assert_held(second, key, block_bytes)
        second.close()

    def test_two_fingerprints_never_share(self) -> None:
        """Storages with different fingerprints, or different block sizes, never share a block on one medium."""
        mine = self.fingerprint
        others = [b"", mine[:-1], mine + b"\0", mine * 100, mine.hex().encode(), mine[:-1] + bytes([mine[-1] ^ 1])]
        owner = self.create(self.context())
        owner.put(b"key", _block(b"key", 1000))
        contexts = [StorageContext(other, 1000) for other in others] + [StorageContext(mine, 999)]
        for context in contexts:
            stranger = self.create(context)
            # The empty fingerprint is not random, so the medium may already have blocks with this fingerprint.
            key = b"key" if context.fingerprint else secrets.token_bytes(16)
            assert stranger.contains([key]) == 0, f"{context} has a block of {mine!r}"
            assert not stranger.get(key, np.empty(context.block_bytes, np.uint8))
            stranger.put(key, _block(b"another", context.block_bytes))
            stranger.close()
        _assert_held(owner, b"key", 1000)
        owner.close()

    def test_clear_forgets_this_fingerprint_alone(self) -> None:
        """`clear` deletes every block of this fingerprint, and no block of another one."""
        mine, other = self.create(self.context()), self.create(StorageContext(self.fingerprint + b"other", 1000))
        for storage in (mine, other):
            storage.put(b"key", _block(b"key", 1000))
        mine.clear()
        assert mine.contains([b"key"]) == 0
        assert not mine.get(b"key", np.empty(1000, np.uint8))
        assert (mine.stats().num_blocks, mine.stats().num_bytes) == (0, 0)
        _assert_held(other, b"key", 1000)
        assert mine.put(b"key", _block(b"key", 1000)), "put() was refused after clear()"
        _assert_held(mine, b"key", 1000)
        for storage in (mine, other):
            storage.close()

    def test_a_size_limit_holds_after_every_put(self) -> None:
        """The size limit holds after every `put`, and the stored blocks are intact."""
        context = self.context()
        storage = self.create_limited(context, num_blocks=4)
        keys = [str(number).encode() for number in range(20)]
        for key in keys:
            storage.put(key, _block(key, 1000))
            num_blocks = storage.stats().num_blocks
            assert num_blocks <= 4, f"the size limit is 4 blocks, but {num_blocks} are stored"
        held = [key for key in keys if storage.contains([key])]
        assert len(held) == storage.stats().num_blocks > 0
        for key in held:
            _assert_held(storage, key, 1000)
        stats = storage.stats()
        assert stats.stored - stats.evicted == stats.num_blocks, f"stored - evicted is not num_blocks: {stats}"
        storage.close()

    def test_methods_may_be_called_from_several_threads(self, block_bytes: int) -> None:
        """Methods may be called from several threads at once: no method raises, and all results are correct."""
        storage = self.create(self.context(block_bytes))
        _assert_no_thread_fails(lambda seed: _use_at_random([storage], seed, block_bytes))
        storage.close()

    def test_several_storages_may_share_a_medium(self) -> None:
        """Several storages may use one medium at the same time; `get` returns a correct block or a miss."""
        storages = [self.create(self.context()) for _ in range(3)]
        _assert_no_thread_fails(lambda seed: _use_at_random(storages, seed, 1000))
        storages[0].put(b"key", _block(b"key", 1000))
        for storage in storages:
            _assert_held(storage, b"key", 1000)
            storage.close()

    def test_threads_keep_the_size_limit(self) -> None:
        """The size limit holds after every `put` of every thread."""
        storage = self.create_limited(self.context(), num_blocks=4)

        def work(seed: int) -> None:
            for number in range(20):
                key = f"{seed}-{number}".encode()
                storage.put(key, _block(key, 1000))
                assert storage.stats().num_blocks <= 4

        _assert_no_thread_fails(work)
        storage.close()

    def test_damage_is_a_miss(self) -> None:
        """A damaged, foreign or missing block is counted as a miss and deleted; it can then be stored again."""
        if not self.damages:
            self.damage("", self.context(), b"")
        for name in self.damages:
            self._check_damage(name)

    def test_damage_while_nobody_looked_is_a_miss(self) -> None:
        """A block that was damaged while no storage was open is a miss; no method raises."""
        if not self.damages:
            self.damage("", self.context(), b"")
        for name in self.damages:
            context = self.context()
            first = self.create(context)
            first.put(name.encode(), _block(name.encode(), 1000))
            first.close()
            self.damage(name, context, name.encode())
            second = self.create(context)
            assert not second.get(name.encode(), np.empty(1000, np.uint8)), f"get() returned a block after: {name}"
            second.close()

    def test_a_medium_that_refuses_raises_nothing(self) -> None:
        """If the medium fails, no method raises, and `failures` counts it."""
        storage = self.create(self.context())
        storage.put(b"held", _block(b"held", 1000))
        self.break_medium()
        out = np.empty(1000, np.uint8)
        assert storage.put(b"new", _block(b"new", 1000)) is False, "put() returned True, but the medium is broken"
        if storage.get(b"held", out):
            assert np.array_equal(out, _block(b"held", 1000))
        storage.contains([b"held", b"new"])
        storage.clear()
        assert storage.stats().failures > 0, "the medium failed, but `failures` is 0"
        storage.close()
        self.create(self.context()).close()

    def _check_damage(self, name: str) -> None:
        context, key = self.context(), name.encode()
        storage = self.create(context)
        storage.put(key, _block(key, 1000))
        storage.put(b"bystander", _block(b"bystander", 1000))
        before = storage.stats()
        self.damage(name, context, key)
        assert storage.get(key, np.empty(1000, np.uint8)) is False, f"get() returned a block after: {name}"
        after = storage.stats()
        assert after.misses == before.misses + 1, f"not counted as a miss: {name}"
        assert after.num_blocks == before.num_blocks - 1, f"still in num_blocks after: {name}"
        assert storage.contains([key]) == 0, f"not deleted after: {name}"
        assert storage.put(key, _block(key, 1000)), f"cannot be stored again after: {name}"
        for intact in (key, b"bystander"):
            _assert_held(storage, intact, 1000)
        storage.close()


def _block(key: bytes, block_bytes: int) -> NDArray[np.uint8]:
    """Return the content of a key's block, uint8 [block_bytes], which depends only on the arguments."""
    return np.frombuffer(random.Random(key).randbytes(block_bytes), np.uint8).copy()


def _assert_held(storage: KVStorage, key: bytes, block_bytes: int) -> None:
    out = np.empty(block_bytes, np.uint8)
    assert storage.get(key, out) is True, f"get({key!r}) is a miss"
    assert np.array_equal(out, _block(key, block_bytes)), f"get({key!r}) returned other bytes than put() stored"


def _use_at_random(storages: Sequence[KVStorage], seed: int, block_bytes: int) -> None:
    """Call all methods in random order, and check that each read block has the content of its key."""
    draw, out = random.Random(seed), np.empty(block_bytes, np.uint8)
    for _ in range(60):
        storage, key = draw.choice(storages), bytes([draw.randrange(6)])
        match draw.randrange(8):
            case 0:
                storage.clear()
            case 1:
                assert 0 <= storage.contains([key, b"never"]) <= 1
            case 2:
                assert storage.stats().num_blocks >= 0
            case 3 | 4 | 5:
                assert storage.put(key, _block(key, block_bytes)) is True, f"put({key!r}) was refused"
            case _:
                if storage.get(key, out):
                    assert np.array_equal(out, _block(key, block_bytes)), f"get({key!r}) returned wrong bytes"
    failures = sum(storage.stats().failures for storage in storages)
    assert failures == 0, f"`failures` is {failures}, but the medium works"


def _assert_no_thread_fails(work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(max_workers=6) as pool:
        for done in [pool.submit(work, seed) for seed in range(6)]:
            done.result()
