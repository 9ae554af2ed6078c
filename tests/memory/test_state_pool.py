import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graftlm.errors import InvariantError
from graftlm.memory import StatePool

NUM_PAGES = 12
PAGES = st.integers(0, NUM_PAGES - 1)


def ids(*pages):
    return np.array(pages, dtype=np.int32)


def test_the_first_slots_belong_to_the_initial_state_and_the_rows():
    pool = StatePool(num_rows=3, num_snapshots=2, num_pages=8)
    assert pool.num_slots == 6
    assert [pool.take(), pool.take(), pool.take()] == [4, 5, None]


def test_the_least_recently_used_state_without_a_lock_is_evicted():
    pool = StatePool(1, 3, 8)
    for page in (5, 6, 7):
        assert pool.store(page, pool.take())
    pool.touch(5)
    pool.lock(6)
    assert pool.take() == 4  # of page 7
    assert pool.holds(ids(5, 6, 7)).tolist() == [True, True, False]
    assert pool.num_evicted == 1


def test_a_page_has_one_state():
    pool = StatePool(1, 2, 8)
    first, second = pool.take(), pool.take()
    assert pool.store(3, first)
    assert not pool.store(3, second)
    assert pool.slot_of(3) == first


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.slot_of(0),
        lambda pool: pool.unlock(2),
        lambda pool: (pool.lock(2), pool.drop(ids(2))),
        lambda pool: (pool.give_back(2), pool.check(np.ones(8, dtype=np.bool_), [])),
        lambda pool: pool.check(np.zeros(8, dtype=np.bool_), []),
        lambda pool: (pool.take(), pool.check(np.ones(8, dtype=np.bool_), [])),
    ],
)
def test_misuse_is_an_error(misuse):
    pool = StatePool(1, 2, 8)
    pool.store(2, pool.take())
    with pytest.raises(InvariantError):
        misuse(pool)


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a dictionary page -> slot, whose order is that of the last uses."""

    def __init__(self):
        super().__init__()
        self.pool = StatePool(num_rows=2, num_snapshots=5, num_pages=NUM_PAGES)
        self.stored: dict[int, int] = {}
        self.locks: list[int] = []
        self.taken: list[int] = []

    @rule()
    def take(self):
        is_full = len(self.stored) + len(self.taken) == 5
        victim = next((page for page in self.stored if page not in self.locks), None)
        slot = self.pool.take()
        if is_full and victim is None:
            assert slot is None
            return
        if is_full:
            assert slot == self.stored.pop(victim)
        assert slot is not None
        self.taken.append(slot)

    @precondition(lambda self: self.taken)
    @rule(page=PAGES)
    def store(self, page):
        if self.pool.store(page, self.taken[-1]):
            assert page not in self.stored
            self.stored[page] = self.taken.pop()
        else:
            self.stored[page] = self.stored.pop(page)

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self):
        self.pool.give_back(self.taken.pop())

    @precondition(lambda self: self.stored)
    @rule(pick=st.integers(0, 9))
    def use(self, pick):
        page = list(self.stored)[pick % len(self.stored)]
        self.pool.touch(page)
        self.stored[page] = self.stored.pop(page)

    @precondition(lambda self: self.stored)
    @rule(pick=st.integers(0, 9))
    def lock(self, pick):
        page = list(self.stored)[pick % len(self.stored)]
        self.pool.lock(page)
        self.locks.append(page)

    @precondition(lambda self: self.locks)
    @rule(pick=st.integers(0, 9))
    def unlock(self, pick):
        self.pool.unlock(self.locks.pop(pick % len(self.locks)))

    @rule(pages=st.sets(PAGES))
    def drop(self, pages):
        gone = sorted(pages - set(self.locks))
        self.pool.drop(ids(*gone))
        for page in gone:
            self.stored.pop(page, None)

    @rule(num_states=st.integers(0, 3))
    def evict(self, num_states):
        victims = [page for page in self.stored if page not in self.locks][:num_states]
        assert self.pool.evict(num_states) == len(victims)
        for page in victims:
            del self.stored[page]

    @rule()
    def clear(self):
        self.pool.clear()
        self.stored.clear()
        self.locks.clear()
        self.taken.clear()

    @invariant()
    def agrees_with_the_dictionary(self):
        assert self.pool.holds(np.arange(NUM_PAGES, dtype=np.int32)).nonzero()[0].tolist() == sorted(self.stored)
        assert all(self.pool.slot_of(page) == slot for page, slot in self.stored.items())
        assert self.pool.num_stored == len(self.stored)
        assert self.pool.num_free == 5 - len(self.stored) - len(self.taken)
        self.pool.check(np.isin(np.arange(NUM_PAGES), list(self.stored)), self.taken)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
