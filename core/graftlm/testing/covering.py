"""Chooses covering arrays: a few rows of a product that contain, for any two columns, every pair of values."""

from collections.abc import Hashable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations

__all__ = ["covering_rows"]


def covering_rows(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Choose rows that contain every combination of values of any `strength` columns that occurs in `rows`.

    The choice is greedy and deterministic: it repeatedly adds the first row with the most missing combinations. `rows`
    need not be a full product; only combinations that occur are covered.

    Args:
        rows: each row has one value per column; all have the same length.
        strength: 1 covers each value, 2 each pair of values, and so on. If the rows have at most `strength` columns,
            each distinct row is covered.

    Returns: indices of the chosen rows, ascending.

    Raises:
        ValueError: `strength` is less than 1.
    """
    if strength < 1:
        raise ValueError(f"strength: got {strength}, expected 1 or more")
    missing = {combination for row in rows for combination in _combinations(row, strength)}
    # The gain of a row is its number of missing combinations. Gains only decrease, so a gain in the heap is an upper
    # bound: if the top row's gain is still current, it is the largest.
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
    """Yield the row's values in each combination of `strength` columns, or all values if the row has fewer columns."""
    return combinations(enumerate(row), min(strength, len(row)))
