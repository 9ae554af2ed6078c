"""Sets of numbers as bits of an integer."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["bits_of", "mask_of"]

#: Number of elements from which numpy converts a mask faster than a loop.
_FROM_ELEMENTS: Final = 24


def bits_of(mask: int) -> NDArray[np.intp]:
    """Return the numbers of the bits that are set, in ascending order, int64."""
    if mask.bit_count() >= _FROM_ELEMENTS:
        packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return np.array(found, dtype=np.intp)


def mask_of(flags: NDArray[np.bool_]) -> int:
    """Return the integer in which the bits of true flags are set."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
