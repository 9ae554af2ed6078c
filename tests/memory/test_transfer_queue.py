"""Each step gets the copies that must run with it, and those that must run before it overwrites their pages."""

import numpy as np
import pytest

from graftlm.contracts import BlockCopy, StepCopies
from graftlm.memory import TransferQueue

PAGE_SIZE = 4


def make_queue():
    return TransferQueue(32, "float32", PAGE_SIZE, lambda n, p: np.zeros((n, p * 32), dtype=np.uint8))


def copy(slot, *pages):
    return BlockCopy(slot, 0, np.array(pages, dtype=np.int32))


def writes(*pages):
    """Return the slots of a step that writes one token in each page."""
    return np.array(pages, dtype=np.int64) * PAGE_SIZE + 1


def slots(copies):
    return [c.slot for c in copies]


def test_a_store_during_planning_runs_with_the_next_step():
    queue = make_queue()
    queue.begin_plan()
    queue.store(copy(0, 5))  # the step overwrites page 5
    assert queue.take(writes(5)) is None
    queue.begin_plan()
    assert slots(queue.take(writes(6)).stores) == [0]
    assert queue.take(writes(7)) is None


def test_an_evicted_page_is_stored_before_the_planned_step_overwrites_it():
    queue = make_queue()
    queue.begin_plan()
    queue.store(copy(0, 5, 6))
    queue.store(copy(1, 8))
    queue.hurry(np.array([6], dtype=np.int32))
    queue.store_now(copy(2, 9))
    copies = queue.take(writes(6))
    assert (slots(copies.early_stores), slots(copies.stores)) == ([0], [2])
    queue.begin_plan()
    assert slots(queue.take(writes(6)).stores) == [1]


def test_a_page_that_a_load_overwrites_is_stored_first():
    queue = make_queue()
    queue.store_now(copy(0, 5))
    queue.store_now(copy(1, 6))
    queue.load(copy(2, 5))
    copies = queue.take(writes(9))
    assert (slots(copies.early_stores), slots(copies.loads), slots(copies.stores)) == ([0], [2], [1])


def test_loads_into_pages_that_the_step_writes_run_first_and_in_order():
    queue = make_queue()
    queue.load(copy(0, 5, 6))  # its row lost these pages again while the step was planned
    queue.load(copy(1, 6, 7))
    copies = queue.take(writes(5))
    assert (slots(copies.early_loads), slots(copies.loads)) == ([0, 1], [])


def test_an_idle_engine_takes_all_copies():
    queue = make_queue()
    assert queue.take_all() is None
    queue.store(copy(0, 5))
    queue.load(copy(1, 6))
    copies = queue.take_all()
    assert (slots(copies.stores), slots(copies.loads)) == ([0], [1])


def test_a_dropped_copy_is_reported_once():
    queue = make_queue()
    queue.store_now(copy(0, 5))
    in_flight = queue.take(writes(9))
    queue.store_now(copy(1, 5))
    queue.copies_done(queue.take(writes(9)))
    queue.store(copy(2, 5))
    queue.load(copy(3, 6))
    first, queued = queue.drop()
    assert first is in_flight
    assert (slots(queued.stores), slots(queued.loads)) == ([2], [3])
    assert all(c == StepCopies() or not c.stores for c in queue.drop())
    with pytest.raises(ValueError, match="not in list"):
        queue.copies_done(in_flight)
