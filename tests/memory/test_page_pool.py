import numpy as np
import pytest

from graftlm.errors import InvariantError
from graftlm.memory import PagePool


def test_new_pages_are_allocated_in_ascending_order():
    pool = PagePool(10)
    assert pool.alloc(4).tolist() == [0, 1, 2, 3]
    assert pool.alloc(2).tolist() == [4, 5]
    assert pool.num_free == 4


def test_freed_pages_are_allocated_again_in_their_order():
    pool = PagePool(6)
    pages = pool.alloc(6)
    pool.free(pages[2:5])
    assert pool.alloc(3).tolist() == [2, 3, 4]


def test_the_returned_array_belongs_to_the_caller():
    pool = PagePool(4)
    pages = pool.alloc(2)
    pages[:] = 3  # the caller may change the array
    assert sorted(pool.alloc(2).tolist()) == [2, 3]


def test_allocating_more_pages_than_are_free_is_an_error():
    pool = PagePool(3)
    pool.alloc(2)
    with pytest.raises(InvariantError, match="asked for 2 pages, 1 are free"):
        pool.alloc(2)
    assert pool.num_free == 1


@pytest.mark.parametrize("pages", [[0], [2, 5], [4, 4]])
def test_a_page_freed_twice_is_an_error_that_changes_nothing(pages):
    pool = PagePool(6)
    pool.alloc(5)
    pool.free(np.array([0, 2], dtype=np.int32))
    before = pool.free_mask().tolist()
    with pytest.raises(InvariantError, match="freed twice"):
        pool.free(np.array(pages, dtype=np.int32))
    assert pool.free_mask().tolist() == before
    assert pool.num_free == 3
