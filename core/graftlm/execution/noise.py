"""Noise for sampling: uniform numbers that are a function of a seed and a position."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["uniform"]

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio, made odd
_FACTOR_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2: Final = np.uint64(0x94D049BB133111EB)
_UNIT: Final = 2.0**-53


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each pair of a seed and a position; equal pairs give equal numbers.

    A seed names a SplitMix64 sequence, a position its place in it (Steele, Lea and Flood, OOPSLA 2014). The seed is
    mixed first, so that seeds that differ by little do not name sequences that overlap.

    Args:
        seeds: uint64 [n].
        positions: int64 [n].

    Returns: float64 [n], 53 random bits each.
    """
    with np.errstate(over="ignore"):
        start = _mix(seeds + _GAMMA)
        bits = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * _UNIT


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _FACTOR_1
    z = (z ^ (z >> np.uint64(27))) * _FACTOR_2
    return z ^ (z >> np.uint64(31))
