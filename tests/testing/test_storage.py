"""The fake storage passes the kit of KV storages, and each faulty storage fails."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import pytest

from graftlm.contracts import StorageContext
from graftlm.testing import FakeKVStorage, FakeMedium, KVStorageConformance, run_conformance


class FakeKit(KVStorageConformance):
    """The kit with a `FakeMedium`, for the fake storage and its subclasses."""

    damages = ("a flipped bit", "a lost block")
    storage: Callable[..., FakeKVStorage] = FakeKVStorage

    @cached_property
    def medium(self) -> FakeMedium:
        return FakeMedium()

    def create(self, context):
        return type(self).storage(context, self.medium)

    def create_limited(self, context, num_blocks):
        return type(self).storage(context, FakeMedium(max_blocks=num_blocks))

    def damage(self, name, context, key):
        (self.medium.damage if name == "a flipped bit" else self.medium.lose)(context, key)

    def break_medium(self):
        self.medium.is_broken = True


class TestFakeKVStorage(FakeKit):
    """The fake meets the contract."""


class LosesBlocksOnReopening(FakeKVStorage):
    def __init__(self, context, medium):
        super().__init__(context, FakeMedium(max_blocks=medium.max_blocks))


class IgnoresTheFingerprint(FakeKVStorage):
    def __init__(self, context, medium):
        super().__init__(StorageContext(b"", context.block_bytes), medium)


class IgnoresTheSizeLimit(FakeKVStorage):
    def __init__(self, context, medium):
        medium.max_blocks = None
        super().__init__(context, medium)


class IgnoresDamage(FakeKVStorage):
    def _take(self, key):
        found = self.medium.blocks.get(self._place(key))
        return found[0] if found else None


class RaisesOnAFaultyMedium(FakeKVStorage):
    def put(self, key, data):
        if self.medium.is_broken:
            raise OSError("no space left on device")
        return super().put(key, data)


class CountsAllFoundKeys(FakeKVStorage):
    def contains(self, keys):
        return sum(super(CountsAllFoundKeys, self).contains([key]) for key in keys)


class RewritesHeldBlocks(FakeKVStorage):
    def put(self, key, data):
        self.medium.blocks.pop(self._place(key), None)
        return super().put(key, data)


class ClearsAllFingerprints(FakeKVStorage):
    def clear(self):
        super().clear()
        self.medium.blocks.clear()


class ZeroesTheLastByte(FakeKVStorage):
    def put(self, key, data):
        return super().put(key, np.concatenate([data[:-1], np.zeros(1, np.uint8)]))


class KeepsTheArray(FakeKVStorage):
    def put(self, key, data):
        is_held = super().put(key, data)
        self.medium.blocks[self._place(key)] = (data, 0)
        return is_held

    def _take(self, key):
        found = self.medium.blocks.get(self._place(key))
        return found[0] if found else None


class FailsOnConcurrentPuts(FakeKVStorage):
    is_busy = False

    def put(self, key, data):
        if type(self).is_busy:
            raise RuntimeError("two at once")
        type(self).is_busy = True
        try:
            np.sort(np.random.default_rng(0).random(20_000))  # so that another thread can run
            return super().put(key, data)
        finally:
            type(self).is_busy = False


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (LosesBlocksOnReopening, "test_what_was_stored_outlives_the_storage[1]"),
        (IgnoresTheFingerprint, "test_two_fingerprints_never_share"),
        (IgnoresTheSizeLimit, "test_a_size_limit_holds_after_every_put"),
        (IgnoresTheSizeLimit, "test_threads_keep_the_size_limit"),
        (IgnoresDamage, "test_damage_is_a_miss"),
        (RaisesOnAFaultyMedium, "test_a_medium_that_refuses_raises_nothing"),
        (CountsAllFoundKeys, "test_contains_counts_from_the_front"),
        (RewritesHeldBlocks, "test_a_block_that_is_held_is_not_written_again[1]"),
        (ClearsAllFingerprints, "test_clear_forgets_this_fingerprint_alone"),
        (ZeroesTheLastByte, "test_get_fills_in_exactly_what_was_put[1000]"),
        (KeepsTheArray, "test_the_storage_keeps_copies[1000]"),
        (FailsOnConcurrentPuts, "test_methods_may_be_called_from_several_threads[1000]"),
    ],
)
def test_a_faulty_storage_is_found(broken, sentence):
    class Kit(FakeKit):
        storage = broken

    failed = {result.name for result in run_conformance(Kit) if result.error}
    assert sentence in failed


def test_tests_that_need_a_missing_kit_method_are_skipped_with_the_reason():
    class Kit(KVStorageConformance):
        @cached_property
        def medium(self):
            return FakeMedium()

        def create(self, context):
            return FakeKVStorage(context, self.medium)

    results = run_conformance(Kit)
    assert [result.name for result in results if result.error] == []
    assert {result.skipped for result in results if result.skipped} == {
        "the kit cannot set a size limit: it does not override create_limited()",
        "the kit cannot damage a block: it does not override damages and damage()",
        "the kit cannot break the medium: it does not override break_medium()",
    }
