"""Evicted pages identify the blocks that end in them."""

import numpy as np

from graftlm_cache.hicache.residents import Residents


def pages(*ids):
    return np.array(ids, dtype=np.int32)


def taken(residents, *ids):
    return [(key, found.tolist()) for key, found in residents.take(pages(*ids))]


def test_a_block_is_found_once_by_its_last_page():
    residents = Residents()
    residents.add(b"a", pages(7, 3))
    residents.add(b"b", pages(7, 5000))  # shares its first page
    assert taken(residents, 7, 8) == []
    assert taken(residents, 5000, 9999) == [(b"b", [7, 5000])]
    assert taken(residents, 5000) == []
    assert taken(residents, 1, 3, 7) == [(b"a", [7, 3])]
    assert len(residents) == 0


def test_a_reused_page_belongs_to_its_new_block():
    residents = Residents()
    residents.add(b"a", pages(1))
    residents.add(b"b", pages(1))
    assert taken(residents, 1) == [(b"b", [1])]


def test_pages_are_copied():
    residents, given = Residents(), pages(1, 2)
    residents.add(b"a", given)
    given[:] = 9
    assert next(iter(residents))[1].tolist() == [1, 2]
