"""Features of pictures share a budget; those in use are never evicted."""

import pytest

from graftlm.errors import InvariantError
from graftlm.memory import FeaturePool


def test_features_without_users_are_evicted_in_order_of_use():
    pool = FeaturePool(10)
    for key in (b"a", b"b"):
        assert pool.acquire(key, 4)
        pool.set_ready([key])
        pool.release(key)
    assert pool.acquire(b"a", 4)
    pool.release(b"a")
    assert pool.acquire(b"c", 5)
    assert pool.take_dropped() == (b"b",)
    assert (pool.is_ready(b"a"), pool.is_ready(b"b"), pool.is_ready(b"c")) == (True, False, False)
    assert (pool.num_held_rows, pool.num_pending, pool.num_computed) == (9, 1, 2)


def test_features_in_use_stay():
    pool = FeaturePool(10)
    assert pool.acquire(b"a", 6)
    assert pool.acquire(b"a", 6)  # a second user needs no room
    assert not pool.acquire(b"b", 5)
    pool.release(b"a")
    assert not pool.acquire(b"b", 5)
    pool.release(b"a")
    assert pool.acquire(b"b", 5)
    assert pool.take_dropped() == (b"a",)


def test_failed_and_cleared_features_leave_no_room_taken():
    pool = FeaturePool(10)
    assert pool.acquire(b"a", 10)
    pool.fail(b"a")
    pool.release(b"a")
    assert pool.acquire(b"b", 10)
    pool.clear()
    assert (pool.take_dropped(), pool.num_held_rows) == ((b"b",), 0)
    pool.set_ready([b"b"])
    assert not pool.holds(b"b")


def test_a_surplus_release_is_an_error():
    pool = FeaturePool(10)
    pool.acquire(b"a", 1)
    pool.release(b"a")
    with pytest.raises(InvariantError):
        pool.release(b"a")
