"""Computes noise for sampling: exponential random numbers as a function of seed, position and column."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["exponential", "noise_keys"]

_GAMMA: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, rounded to an odd number
_FACTOR_1: Final = 0xBF58476D1CE4E5B9
_FACTOR_2: Final = 0x94D049BB133111EB
_UNIT: Final = 2.0**-53


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one noise key per pair of seed and position; equal pairs give equal keys.

    A seed selects a SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014), and a position selects one of its
    elements. The seed is mixed first, so that similar seeds do not select overlapping sequences.

    Args:
        seeds: uint64 [n].
        positions: int64 [n].

    Returns: int64 [n], the keys, 64 bits each.
    """
    gamma = np.uint64(_GAMMA)
    with np.errstate(over="ignore"):
        start = _mix_on_host(seeds + gamma)
        keys = _mix_on_host(start + (positions.astype(np.uint64) + np.uint64(1)) * gamma)
    return keys.view(np.int64)


def exponential(keys: Tensor, num: int) -> Tensor:
    """Return exponentially distributed numbers with mean 1, from the first elements of each key's SplitMix64 sequence.

    Args:
        keys: int64 [n], results of `noise_keys`.

    Returns: float64 [n, num] on the keys' device, above 0; each number is computed from 53 random bits.
    """
    places = torch.arange(1, num + 1, device=keys.device) * _signed(_GAMMA)
    bits = _mix(keys[:, None] + places)
    uniform = (_shifted(bits, 11).double() + 0.5) * _UNIT
    return -torch.log(uniform)


def _mix_on_host(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTOR_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return z ^ (z >> np.uint64(31))


def _mix(z: Tensor) -> Tensor:
    """Mix 64-bit numbers that are stored as int64; products wrap around."""
    z = (z ^ _shifted(z, 30)) * _signed(_FACTOR_1)
    z = (z ^ _shifted(z, 27)) * _signed(_FACTOR_2)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, num_bits: int) -> Tensor:
    """Shift right logically."""
    return (z >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64)  # for constants with a set top bit, which are all three
