"""Digests of the blocks of a token sequence.

A block is hashed by multiply and add: each pair of its tokens is a 64-bit number, which is multiplied by a random odd
number for its position in the block; the products are added modulo 2^64. The sum is scrambled together with the
block's number. The digest of a block is the sum of the scrambled numbers up to this block. Therefore a digest is also
the state from which the digests of the following blocks are computed. All steps are vectorized.

The random numbers are fixed, and the digests are not cryptographic: a client could construct collisions. Digests may
therefore decide about speed only, and not about which keys and values a request uses.
"""

import hashlib
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
_OFFSETS: Final[NDArray[np.uint64]] = np.arange(1, 4097, dtype=np.uint64) * _GOLDEN
_FACTOR: Final = np.uint64(0xBF58476D1CE4E5B9)
_SHIFTS: Final = (np.uint64(29), np.uint64(32))
_NO_DIGESTS: Final[NDArray[np.uint64]] = np.empty(0, dtype=np.uint64)


class BlockDigests:
    """Computes digests of blocks of a fixed length. A sequence can be hashed piece by piece.

    Attributes:
        block_tokens: number of tokens in a block, 1 or an even number.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        num_pairs = max(1, block_tokens // 2)
        self._multipliers = np.random.default_rng(_SEED).integers(1, 2**64 - 1, num_pairs, dtype=np.uint64) | _ONE

    def start(self, namespace: str) -> int:
        """Return the digest before the first block of a namespace."""
        return _namespace_digest(namespace)

    def extend(self, token_ids: TokenIds, first_block: int, before: int) -> NDArray[np.uint64]:
        """Return the digests of the whole blocks of a sequence.

        Args:
            token_ids: int32 [n], which starts at a block; tokens after the last whole block are ignored.
            first_block: number of the first block, counted from the start of the prompt.
            before: digest of the block before the first block, or `start`.

        Returns: uint64 [n // block_tokens].
        """
        num_blocks = len(token_ids) // self.block_tokens
        if not num_blocks:
            return _NO_DIGESTS
        tokens = token_ids[: num_blocks * self.block_tokens]
        if self.block_tokens % 2:
            pairs = tokens.astype(np.uint64)
        else:
            pairs = np.ascontiguousarray(tokens, dtype="<i4").view(np.uint64)
        values: NDArray[np.uint64] = pairs.reshape(num_blocks, -1) @ self._multipliers
        values += _block_offsets(first_block, num_blocks)
        values ^= values >> _SHIFTS[0]
        values *= _FACTOR
        values ^= values >> _SHIFTS[1]
        values[:1] += np.uint64(before)
        return values.cumsum()

    def of_prompt(self, token_ids: TokenIds, namespace: str) -> list[int]:
        """Return the digests of all whole blocks of a prompt."""
        found: list[int] = self.extend(token_ids, 0, _namespace_digest(namespace)).tolist()
        return found


def _block_offsets(first_block: int, num_blocks: int) -> NDArray[np.uint64]:
    """Return a different number for each block's number, uint64 [num_blocks]."""
    end = first_block + num_blocks
    if end <= len(_OFFSETS):
        return _OFFSETS[first_block:end]
    return np.arange(first_block + 1, end + 1, dtype=np.uint64) * _GOLDEN


@lru_cache(maxsize=4096)
def _namespace_digest(namespace: str) -> int:
    if not namespace:
        return 0
    return int.from_bytes(hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
