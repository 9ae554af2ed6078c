import random

import pytest

from graftlm_speculation.row_pages import RowPages


def test_a_row_keeps_its_pages_when_it_grows():
    pages = RowPages(num_pages=8, page_size=4)
    assert pages.reserve(0, 5, kept=()) == []
    first = pages.of(0).tolist()
    assert len(first) == 2
    assert pages.reserve(0, 13, kept=()) == []
    assert pages.of(0).tolist()[:2] == first
    assert len(pages.of(0)) == 4
    assert pages.reserve(0, 1, kept=()) == []  # a shorter request keeps what it has
    assert len(pages.of(0)) == 4
    assert pages.num_free == 4


def test_the_least_recently_used_rows_lose_their_pages():
    pages = RowPages(num_pages=6, page_size=1)
    for row in (0, 1, 2):
        pages.reserve(row, 2, kept=())
    pages.reserve(0, 2, kept=())
    assert list(pages) == [0, 2, 1]
    assert pages.reserve(3, 3, kept=()) == [1, 2]
    assert list(pages) == [3, 0]
    assert pages.num_free == 1


def test_rows_that_are_kept_lose_nothing():
    pages = RowPages(num_pages=4, page_size=1)
    pages.reserve(0, 2, kept=())
    pages.reserve(1, 2, kept=())
    assert pages.reserve(2, 1, kept=(0, 1)) is None
    assert 2 not in pages
    assert pages.reserve(2, 1, kept=(0,)) == [1]


@pytest.mark.parametrize("num_tokens", [9, 1000])
def test_a_row_that_does_not_fit_takes_nothing_from_others(num_tokens):
    pages = RowPages(num_pages=4, page_size=2)
    pages.reserve(0, 8, kept=())
    assert pages.reserve(1, num_tokens, kept=()) is None
    assert len(pages.of(0)) == 4


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lost_or_shared(seed):
    draw = random.Random(seed)
    pages = RowPages(num_pages=20, page_size=3)
    for _ in range(500):
        row = draw.randrange(6)
        if draw.random() < 0.2:
            pages.release(row)
            assert row not in pages
        else:
            kept = {draw.randrange(6)}
            before = {other: pages.of(other).tolist() for other in pages}
            num_tokens = draw.randrange(1, 70)
            evicted = pages.reserve(row, num_tokens, kept)
            assert not (set(evicted or ()) & (kept | {row}))
            assert evicted is None or len(pages.of(row)) * 3 >= num_tokens
            lost = {row, *(evicted or ())}
            assert all(pages.of(other).tolist() == own for other, own in before.items() if other not in lost)
        held = [page for other in pages for page in pages.of(other).tolist()]
        assert len(held) == len(set(held))
        assert len(held) + pages.num_free == 20
