"""Tile sizes and context splits of the Triton kernels."""

from dataclasses import dataclass

import torch

__all__ = ["ContextSplits", "TileShape", "decode_shape", "extend_shape", "split_contexts"]

#: Minimum length of a piece of a context in tokens. Merging shorter pieces costs more time than splitting saves.
_MIN_SPLIT_TOKENS = 128
#: Maximum length of a piece of a context in tokens, so that one long request does not take much longer than short ones.
_MAX_SPLIT_TOKENS = 8192
#: Number of programs of the decode kernel that run on a multiprocessor at the same time, limited by its registers and
#: shared memory.
_PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class TileShape:
    """The compile-time constants of a kernel.

    Attributes:
        block_m: number of rows of queries; a row is one query head of one token.
        block_n: number of context positions per iteration of the inner loop.
        block_d: head_dim, rounded up to a power of two.
        num_warps, num_stages: launch settings of the kernel.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ContextSplits:
    """The split of contexts: each context has at most `num_splits` pieces of at least `min_tokens` tokens."""

    num_splits: int
    min_tokens: int


def extend_shape(group: int, head_dim: int, dtype: torch.dtype, max_query_len: int) -> TileShape:
    """Return the tile shape for chunks.

    Args:
        group: number of query heads per key/value head.
        head_dim: D.
        dtype: dtype of the queries.
        max_query_len: number of tokens of the longest chunk; small tiles are chosen if all chunks are short.
    """
    block_d = _block_d(head_dim)
    if dtype.itemsize > 2:  # tiles need twice the shared memory
        largest, block_n, num_warps, num_stages = 64, 64 if block_d <= 64 else 32, 4, 1
    elif block_d <= 64:
        largest, block_n, num_warps, num_stages = 128, 64, 4, 3
    elif block_d <= 128:
        largest, block_n, num_warps, num_stages = 128, 64, 8, 2
    else:
        largest, block_n, num_warps, num_stages = 64, 32, 4, 2
    rows = group * max_query_len
    block_m = next(m for m in (16, 64, 128) if m >= min(rows, largest))
    block_m = max(block_m, _power_of_two(group))  # a tile contains all heads of a token
    return TileShape(block_m, block_n, block_d, num_warps if block_m > 16 else 4, num_stages)


def decode_shape(group: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tile shape for one-token requests; see `extend_shape` for the arguments."""
    block_d = _block_d(head_dim)
    block_m = max(16, _power_of_two(group))  # tensor cores need 16 rows; memory is the limit, so unused rows are free
    if dtype.itemsize > 2:
        return TileShape(block_m, 64 if block_d <= 64 else 32, block_d, num_warps=4, num_stages=1)
    block_n = 128 if block_d <= 64 else 8192 // block_d
    return TileShape(block_m, block_n, block_d, num_warps=4, num_stages=3)


def split_contexts(
    num_requests: int, num_kv_heads: int, max_len: int, num_processors: int, split_tokens: int | None
) -> ContextSplits:
    """Return the split of the contexts of one-token requests.

    The result does not depend on a step's context lengths, but only on shapes, because a captured graph fixes it.

    Args:
        num_requests: number of one-token requests in the batch.
        num_kv_heads: H_kv.
        max_len: maximum number of tokens that a query attends to, from the page table's width and the window.
        num_processors: number of multiprocessors of the device.
        split_tokens: number of tokens of every piece, in every batch; None: contexts are split into as many pieces as
            the device computes at the same time, within the limits of a piece's length.
    """
    if split_tokens is not None:
        return ContextSplits(max(1, -(-max_len // split_tokens)), split_tokens)
    fill = num_processors * _PROGRAMS_PER_PROCESSOR // (num_requests * num_kv_heads)
    wanted = max(1, fill, -(-max_len // _MAX_SPLIT_TOKENS))
    return ContextSplits(max(1, min(wanted, max_len // _MIN_SPLIT_TOKENS)), _MIN_SPLIT_TOKENS)


def _block_d(head_dim: int) -> int:
    return max(16, _power_of_two(head_dim))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
