from itertools import combinations, product

import pytest

from graftlm.testing.covering import covering_rows


def pairs(rows):
    """Return every pair of values, with their two columns, that occurs in the rows."""
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize(
    ("sizes", "most"), [((3, 3, 3), 12), ((2, 2, 2, 2), 8), ((4, 3, 5, 2), 24), ((2,) * 8, 12), ((6, 6, 1), 36)]
)
def test_the_chosen_rows_cover_every_pair_and_are_few(sizes, most):
    rows = list(product(*(range(size) for size in sizes)))
    chosen = covering_rows(rows)
    assert pairs([rows[i] for i in chosen]) == pairs(rows)
    assert len(chosen) <= most


def test_only_pairs_that_occur_are_covered():
    rows = [row for row in product("ab", "xy", (1, 2)) if row[:2] != ("b", "y")]
    chosen = [rows[i] for i in covering_rows(rows)]
    assert pairs(chosen) == pairs(rows)


def test_two_columns_need_every_row_and_equal_rows_are_chosen_once():
    assert covering_rows([("a", 1), ("a", 2), ("b", 1), ("a", 1)]) == [0, 1, 2]


def test_one_column_needs_each_value_once():
    assert covering_rows([(1,), (2,), (1,)]) == [0, 1]
    assert covering_rows(list(product(range(3), range(4))), strength=1) == [0, 3, 5, 10]


def test_higher_strengths_cover_triples():
    rows = list(product(range(2), repeat=5))
    chosen = [rows[i] for i in covering_rows(rows, strength=3)]
    found = {triple for row in chosen for triple in combinations(enumerate(row), 3)}
    assert len(found) == 10 * 8
    assert len(chosen) < len(rows)


def test_equal_rows_give_an_equal_choice():
    rows = list(product("abc", "xyz", range(4), range(2)))
    assert covering_rows(rows) == covering_rows(rows)
    assert covering_rows([]) == []


def test_a_strength_below_1_is_refused():
    with pytest.raises(ValueError, match="got 0, expected 1 or more"):
        covering_rows([(1, 2)], strength=0)
