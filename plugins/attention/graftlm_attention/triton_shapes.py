"""How the Triton kernels cut their work: tile sizes by head size, splits by how much of the device a batch fills."""

from dataclasses import dataclass

import torch

__all__ = ["ContextSplits", "TileShape", "decode_shape", "extend_shape", "split_contexts"]

#: A piece of a context is at least this long: a shorter one costs more to merge than it saves.
_MIN_SPLIT_TOKENS = 128
#: No piece is longer, so that one long request does not outlast a batch of short ones.
_MAX_SPLIT_TOKENS = 8192
#: Programs of the decode kernel that a multiprocessor holds at a time, by its registers and shared memory.
_PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class TileShape:
    """The constants that a kernel is compiled with.

    Attributes:
        block_m: rows of queries; a row is one query head of one token.
        block_n: positions of context in one turn of the inner loop.
        block_d: head_dim, rounded up to a power of two.
        num_warps, num_stages: of the kernel.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ContextSplits:
    """How contexts are cut: each into at most `num_splits` pieces of at least `min_tokens`."""

    num_splits: int
    min_tokens: int


def extend_shape(group: int, head_dim: int, dtype: torch.dtype, max_query_len: int) -> TileShape:
    """Return the tiles for chunks.

    Args:
        group: query heads of a key/value head.
        head_dim: D.
        dtype: of the queries.
        max_query_len: the longest chunk, in tokens; short ones take small tiles.
    """
    block_d = _block_d(head_dim)
    if dtype.itemsize > 2:  # tiles take twice the shared memory
        largest, block_n, num_warps, num_stages = 64, 64 if block_d <= 64 else 32, 4, 1
    elif block_d <= 64:
        largest, block_n, num_warps, num_stages = 128, 64, 4, 3
    elif block_d <= 128:
        largest, block_n, num_warps, num_stages = 128, 64, 8, 2
    else:
        largest, block_n, num_warps, num_stages = 64, 32, 4, 2
    rows = group * max_query_len
    block_m = next(m for m in (16, 64, 128) if m >= min(rows, largest))
    block_m = max(block_m, _power_of_two(group))  # all heads of a token stand in one tile
    return TileShape(block_m, block_n, block_d, num_warps if block_m > 16 else 4, num_stages)


def decode_shape(group: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiles for one-token requests; arguments as in `extend_shape`."""
    block_d = _block_d(head_dim)
    block_m = max(16, _power_of_two(group))  # tensor cores take 16 rows, used or not: reading is what takes the time
    if dtype.itemsize > 2:
        return TileShape(block_m, 64 if block_d <= 64 else 32, block_d, num_warps=4, num_stages=1)
    block_n = 128 if block_d <= 64 else 8192 // block_d
    return TileShape(block_m, block_n, block_d, num_warps=4, num_stages=3)


def split_contexts(
    num_requests: int, num_kv_heads: int, max_len: int, num_processors: int, split_tokens: int | None
) -> ContextSplits:
    """Say how the contexts of one-token requests are cut.

    Only shapes decide, none of which a captured graph may change, never the lengths of this step.

    Args:
        num_requests: one-token requests of the batch.
        num_kv_heads: H_kv.
        max_len: tokens that a query sees at most, by the page table's width and the window.
        num_processors: the device's multiprocessors.
        split_tokens: the length of every piece, whatever the batch; None: as many pieces as fill the device once.
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
