"""The kit of KV storages passes the fake, and finds each kind of broken storage."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import pytest

from graftlm.contracts import StorageContext
from graftlm.testing import FakeKVStorage, FakeMedium, KVStorageConformance, run_conformance


class FakeKit(KVStorageConformance):
    """The kit over a `FakeMedium`, for the fake and for what is derived from it."""

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
    """The fake keeps the contract."""


class Forgetful(FakeKVStorage):
    def __init__(self, context, medium):
        super().__init__(context, FakeMedium(max_blocks=medium.max_blocks))


class Sharing(FakeKVStorage):
    def __init__(self, context, medium):
        super().__init__(StorageContext(b"", context.block_bytes), medium)


class Growing(FakeKVStorage):
    def __init__(self, context, medium):
        medium.max_blocks = None
        super().__init__(context, medium)


class Trusting(FakeKVStorage):
    def _take(self, key):
        found = self.medium.blocks.get(self._place(key))
        return found[0] if found else None


class Raising(FakeKVStorage):
    def put(self, key, data):
        if self.medium.is_broken:
            raise OSError("no space left on device")
        return super().put(key, data)


class Counting(FakeKVStorage):
    def contains(self, keys):
        return sum(super(Counting, self).contains([key]) for key in keys)


class Rewriting(FakeKVStorage):
    def put(self, key, data):
        self.medium.blocks.pop(self._place(key), None)
        return super().put(key, data)


class ClearingAll(FakeKVStorage):
    def clear(self):
        super().clear()
        self.medium.blocks.clear()


class Truncating(FakeKVStorage):
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


class OneAtATime(FakeKVStorage):
    is_busy = False

    def put(self, key, data):
        if type(self).is_busy:
            raise RuntimeError("two at once")
        type(self).is_busy = True
        try:
            np.sort(np.random.default_rng(0).random(20_000))  # another thread gets its turn
            return super().put(key, data)
        finally:
            type(self).is_busy = False


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Forgetful, "test_what_was_stored_outlives_the_storage[1]"),
        (Sharing, "test_two_fingerprints_never_share"),
        (Growing, "test_a_size_limit_holds_after_every_put"),
        (Growing, "test_threads_keep_the_size_limit"),
        (Trusting, "test_damage_is_a_miss"),
        (Raising, "test_a_medium_that_refuses_raises_nothing"),
        (Counting, "test_contains_counts_from_the_front"),
        (Rewriting, "test_a_block_that_is_held_is_not_written_again[1]"),
        (ClearingAll, "test_clear_forgets_this_fingerprint_alone"),
        (Truncating, "test_get_fills_in_exactly_what_was_put[1000]"),
        (KeepsTheArray, "test_the_storage_keeps_copies[1000]"),
        (OneAtATime, "test_methods_may_be_called_from_several_threads[1000]"),
    ],
)
def test_a_broken_storage_is_found(broken, sentence):
    class Kit(FakeKit):
        storage = broken

    failed = {result.name for result in run_conformance(Kit) if result.error}
    assert sentence in failed


def test_what_the_kit_was_not_told_is_skipped_with_its_reason():
    class Kit(KVStorageConformance):
        @cached_property
        def medium(self):
            return FakeMedium()

        def create(self, context):
            return FakeKVStorage(context, self.medium)

    results = run_conformance(Kit)
    assert [result.name for result in results if result.error] == []
    assert {result.skipped for result in results if result.skipped} == {
        "the kit was not told how to set a size limit (create_limited)",
        "the kit was not told how to damage a block (damages, damage)",
        "the kit was not told how to break the medium (break_medium)",
    }
