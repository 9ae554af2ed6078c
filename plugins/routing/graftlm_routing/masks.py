"""Sets of numbers as bits of an integer."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["bits_of", "cheapest", "mask_of"]

#: Number of elements from which numpy is faster than a loop.
_FROM_ELEMENTS: Final = 16


def bits_of(mask: int) -> Sequence[int] | NDArray[np.intp]:
    """Return the numbers of the bits that are set, in ascending order; as an array if there are many."""
    if mask.bit_count() >= _FROM_ELEMENTS:
        packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def mask_of(flags: NDArray[np.bool_]) -> int:
    """Return the integer in which the bits of true flags are set."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def cheapest(places: Sequence[int] | NDArray[np.intp], costs: NDArray[np.float64] | NDArray[np.int64]) -> int:
    """Return the first place with the lowest cost. There is at least one place."""
    if isinstance(places, np.ndarray):
        return int(places[costs[places].argmin()])
    return min(places, key=costs.item)
