import numpy as np
import pytest

from graftlm.errors import InvariantError
from graftlm.memory import WindowPages, WindowSpan


def ids(*pages):
    return np.array(pages, dtype=np.int32)


def make(num_pages=8, num_window_pages=4):
    return WindowPages(num_pages, num_window_pages, WindowSpan(window_tokens=8, page_size=4))


def no_free(num_pages=8):
    return np.zeros(num_pages, dtype=np.bool_)


@pytest.mark.parametrize(
    ("window_tokens", "page_size", "spare_tokens", "reach_pages", "keep_pages"),
    [(1, 1, 0, 0, 0), (8, 1, 0, 7, 7), (8, 1, 2, 7, 9), (8, 4, 0, 2, 2), (9, 4, 0, 2, 2), (10, 4, 4, 3, 4)],
)
def test_a_span_is_rounded_to_whole_pages(window_tokens, page_size, spare_tokens, reach_pages, keep_pages):
    span = WindowSpan(window_tokens, page_size, spare_tokens)
    assert (span.reach_pages, span.keep_pages) == (reach_pages, keep_pages)
    assert span.row_pages == keep_pages + max(reach_pages // 4, 1) + 2


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("window_tokens", [1, 2, 7, 8])
@pytest.mark.parametrize("spare_tokens", [0, 3])
def test_no_later_token_sees_the_pages_that_a_row_has_passed(window_tokens, page_size, spare_tokens):
    span = WindowSpan(window_tokens, page_size, spare_tokens)
    computed = np.arange(60)
    passed = span.num_passed(computed)
    assert (passed * page_size <= np.maximum(computed - window_tokens + 1 - spare_tokens, 0)).all()
    assert (computed - passed * page_size <= window_tokens + spare_tokens + 2 * page_size).all()
    assert (passed <= np.maximum(computed // page_size - span.reach_pages, 0)).all()  # a match may end at this place


def test_pages_have_their_own_window_pages_until_these_are_freed():
    window = make()
    window.assign(ids(5, 2, 7))
    assert window.holds(ids(7, 1, 2)).tolist() == [True, False, True]
    assert (window.num_held, window.num_free) == (3, 1)
    assert len(set(window.writable(ids(5, 2, 7)).tolist())) == 3
    window.free(ids(2, 3, 7))
    assert window.holds(ids(5, 2, 7)).tolist() == [True, False, False]
    window.check(no_free())


def test_a_page_table_has_0_for_missing_window_pages():
    window = make()
    window.assign(ids(6))
    window.assign(ids(3))
    table = np.array([[3, 0], [6, 3]], dtype=np.int32)
    assert window.readable(table).tolist() == [[1, 0], [0, 1]]


def test_window_pages_move_only_to_pages_without_one():
    window = make()
    window.assign(ids(0, 1, 2))
    before = window.writable(ids(0, 1, 2)).tolist()
    window.move(ids(0, 1, 4), ids(5, 2, 6))  # page 2 has one, page 4 has none to move
    assert window.holds(ids(0, 1, 2, 5, 6)).tolist() == [False, True, True, True, False]
    assert window.writable(ids(5, 1, 2)).tolist() == before
    window.check(no_free())


def test_wrong_calls_raise_invariant_errors():
    window = make()
    window.assign(ids(1))
    with pytest.raises(InvariantError, match=r"\[1\] have one already"):
        window.assign(ids(0, 1))
    with pytest.raises(InvariantError, match=r"a step writes pages \[4\]"):
        window.writable(ids(1, 4))
    with pytest.raises(InvariantError, match="3 are free"):
        window.assign(ids(2, 3, 4, 5))
    free = no_free()
    free[1] = True
    with pytest.raises(InvariantError, match=r"pages \[1\] are free, but have"):
        window.check(free)
    window.clear()
    window.check(free)
    assert window.num_free == window.num_window_pages == 4
