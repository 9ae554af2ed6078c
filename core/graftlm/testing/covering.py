"""Covering arrays: few rows of a product that hold every combination of any two of its values."""

from collections.abc import Hashable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations

__all__ = ["covering_rows"]


def covering_rows(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Choose rows that hold every combination of values of any `strength` columns that occurs in `rows`.

    The choice is greedy and deterministic: each time the row with the most combinations that no chosen row has, the
    first of equals. `rows` need not be a full product: only combinations that occur are covered.

    Args:
        rows: one value per column in each; all of the same length.
        strength: 1 covers each value, 2 each pair of values; with no more columns than that, each distinct row.

    Returns: indices of the chosen rows, ascending.

    Raises:
        ValueError: `strength` is below 1.
    """
    if strength < 1:
        raise ValueError(f"strength: got {strength}, expected 1 or more")
    missing = {combination for row in rows for combination in _combinations(row, strength)}
    # A gain only falls as rows are chosen, so that the first row whose gain is up to date has the largest.
    heap = [(-len(list(_combinations(row, strength))), index) for index, row in enumerate(rows)]
    heapify(heap)
    chosen = []
    while missing:
        gain, index = heap[0]
        new = missing.intersection(_combinations(rows[index], strength))
        if len(new) < -gain:
            heapreplace(heap, (-len(new), index))
            continue
        heappop(heap)
        missing -= new
        chosen.append(index)
    return sorted(chosen)


def _combinations(row: Sequence[Hashable], strength: int) -> Iterator[tuple[tuple[int, Hashable], ...]]:
    """Yield each choice of `strength` columns with the row's values there; all columns where there are fewer."""
    return combinations(enumerate(row), min(strength, len(row)))
