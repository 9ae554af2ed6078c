"""Digests of the blocks of a token sequence.

A block is hashed by multiply and add: each pair of its tokens is scrambled, and multiplied by a random 64-bit number
for its position in the block; the products are added modulo 2^64. A finalizer (`_mix`) scrambles the sum together with
the block's number. The digest of a prefix is the scrambled running sum of the values of its blocks. All steps are
vectorized.

The random numbers are fixed, and the digests are not cryptographic: a client could construct collisions. Digests may
therefore decide about speed only, and not about which keys and values a request uses.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.types import TokenIds

__all__ = ["BlockDigests"]

#: Seed of the random numbers. All processes must use the same one.
_SEED: Final = 20_240_613

_ONE: Final = np.uint64(1)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_NO_SUMS: Final[NDArray[np.uint64]] = np.empty(0, dtype=np.uint64)


class BlockDigests:
    """Computes digests of blocks of a fixed length.

    The running sum after a block is the state from which the digests of the following blocks are computed. Therefore
    a sequence can be hashed piece by piece.

    Attributes:
        block_tokens: number of tokens in a block, 1 or an even number.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        num_pairs = max(1, block_tokens // 2)
        self._multipliers = np.random.default_rng(_SEED).integers(1, 2**64 - 1, num_pairs, dtype=np.uint64) | _ONE

    def start(self, namespace: str) -> int:
        """Return the running sum before the first block of a namespace."""
        return _namespace_sum(namespace)

    def sums(self, token_ids: TokenIds, first_block: int, before: int) -> NDArray[np.uint64]:
        """Return the running sum after each whole block of a sequence.

        Args:
            token_ids: int32 [n], which starts at a block; tokens after the last whole block are ignored.
            first_block: number of the first block, counted from the start of the prompt.
            before: running sum before the first block.

        Returns: uint64 [n // block_tokens].
        """
        num_blocks = len(token_ids) // self.block_tokens
        if not num_blocks:
            return _NO_SUMS
        values = self._values(token_ids[: num_blocks * self.block_tokens], num_blocks)
        values += np.arange(first_block + 1, first_block + num_blocks + 1, dtype=np.uint64) * _GOLDEN
        _mix(values)
        values[:1] += np.uint64(before)
        return np.cumsum(values, dtype=np.uint64)

    def _values(self, token_ids: TokenIds, num_blocks: int) -> NDArray[np.uint64]:
        """Return the sum of products of each block, uint64 [num_blocks]."""
        if self.block_tokens % 2:
            pairs = token_ids.astype(np.uint64)
        else:
            pairs = np.ascontiguousarray(token_ids, dtype="<i4").view(np.uint64)
        products = pairs * _GOLDEN
        products ^= products >> np.uint64(32)
        products = products.reshape(num_blocks, -1)
        products *= self._multipliers
        sums: NDArray[np.uint64] = products.sum(axis=1, dtype=np.uint64)
        return sums

    def digests(self, sums: NDArray[np.uint64]) -> list[int]:
        """Return the digests of blocks whose running sums are given."""
        mixed = sums.copy()
        _mix(mixed)
        found: list[int] = mixed.tolist()
        return found

    def of_prompt(self, token_ids: TokenIds, namespace: str) -> Sequence[int]:
        """Return the digests of all whole blocks of a prompt."""
        return self.digests(self.sums(token_ids, 0, self.start(namespace)))


def _mix(values: NDArray[np.uint64]) -> None:
    """Scramble each value in place, with the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)


@lru_cache(maxsize=4096)
def _namespace_sum(namespace: str) -> int:
    if not namespace:
        return 0
    return int.from_bytes(hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
