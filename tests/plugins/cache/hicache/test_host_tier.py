"""Host memory keeps the most recently used blocks, and never evicts a block that is read or written."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from graftlm.errors import InvariantError
from graftlm_cache.hicache.host_tier import HostTier

A, B, C, D = (bytes([letter]) * 32 for letter in b"ABCD")


def make_tier(num_slots, *keys):
    tier = HostTier(np.zeros((num_slots, 8), dtype=np.uint8))
    for key in keys:
        block = tier.reserve(key)
        assert tier.fill(block)
        tier.unpin(block)
    return tier


def held(tier):
    return {key for key in (A, B, C, D) if key in tier}


def test_a_block_is_offered_only_after_it_is_filled():
    tier = make_tier(3, A)
    block = tier.reserve(B)
    assert [b.key for b in tier.take([A, B])] == [A]
    tier.fill(block)
    assert [b.key for b in tier.take([A, B, C])] == [A, B]


def test_the_least_recently_used_blocks_are_evicted_first_and_ends_before_starts():
    tier = make_tier(3, A, B, C)
    tier.touch([A, B])
    tier.reserve(D)
    assert held(tier) == {A, B, D}
    tier.reserve(C)
    assert held(tier) == {A, C, D}
    assert tier.num_evicted == 2


def test_pinned_blocks_are_not_evicted():
    tier = make_tier(2, A, B)
    [pinned] = tier.take([A])
    first = tier.reserve(C)
    assert held(tier) == {A, C}
    assert tier.reserve(D) is None
    tier.unpin(pinned)
    assert tier.reserve(D) is not None
    assert held(tier) == {C, D}
    assert tier.at(first.slot) is first


def test_a_block_is_reserved_once():
    tier = make_tier(2, A)
    assert tier.reserve(A) is None


def test_a_cleared_block_keeps_its_slot_until_its_last_unpin():
    tier = make_tier(1, A)
    [pinned] = tier.take([A])
    tier.clear()
    assert len(tier) == 0
    assert tier.reserve(B) is None
    tier.unpin(pinned)
    assert tier.reserve(B) is not None


def test_a_block_cleared_during_its_fill_is_not_filled():
    tier = make_tier(1)
    block = tier.reserve(A)
    tier.clear()
    assert not tier.fill(block)
    tier.unpin(block)
    assert tier.take([A]) == []


def test_unpinning_twice_is_an_error():
    tier = make_tier(1, A)
    [block] = tier.take([A])
    tier.unpin(block)
    with pytest.raises(InvariantError, match="not pinned"):
        tier.unpin(block)


class Machine(RuleBasedStateMachine):
    """Compares a tier with a dictionary in order of use."""

    KEYS = st.sampled_from([bytes([i]) * 32 for i in range(6)])

    def __init__(self):
        super().__init__()
        self.tier = HostTier(np.zeros((3, 8), dtype=np.uint8))
        self.filled = {}  # key -> pins, least recently used first
        self.held = []  # pinned blocks

    @rule(key=KEYS)
    def store(self, key):
        block = self.tier.reserve(key)
        room = len(self.filled) < 3 - self.num_ghosts or any(pins == 0 for pins in self.filled.values())
        assert (block is not None) == (key not in self.filled and room)
        if block is None:
            return
        if len(self.filled) == 3 - self.num_ghosts:
            del self.filled[next(k for k, pins in self.filled.items() if pins == 0)]
        self.filled[key] = 0
        self.tier.fill(block)
        self.tier.unpin(block)

    @rule(keys=st.lists(KEYS, max_size=4, unique=True))
    def touch(self, keys):
        self.tier.touch(keys)
        for key in reversed(keys):
            if key in self.filled:
                self.filled[key] = self.filled.pop(key)

    @rule(keys=st.lists(KEYS, max_size=3, unique=True))
    def take(self, keys):
        expected = []
        for key in keys:
            if key not in self.filled:
                break
            expected.append(key)
            self.filled[key] += 1
        blocks = self.tier.take(keys)
        assert [block.key for block in blocks] == expected
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99))
    def unpin(self, pick):
        block = self.held.pop(pick % len(self.held))
        if not block.is_dropped:
            self.filled[block.key] -= 1
        self.tier.unpin(block)

    @rule()
    def clear(self):
        self.tier.clear()
        self.filled.clear()

    @property
    def num_ghosts(self):
        return len({block.slot for block in self.held if block.is_dropped})

    @invariant()
    def slots_are_used_once(self):
        slots = [self.tier.at(slot).slot for slot in range(3) if slot in self.tier._by_slot]
        assert len(slots) == len(self.filled) + self.num_ghosts
        assert len(self.tier) == len(self.filled)


def test_any_sequence_of_operations_agrees_with_a_dictionary():
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
    )
