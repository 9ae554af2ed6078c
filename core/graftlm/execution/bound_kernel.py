"""The Triton kernel that finds the bounds of top-k and top-p without sorting.

Import this module only for logits on a GPU, because it imports Triton.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["kth_largest", "top_p_bounds"]

#: Number of columns of one loop iteration: 8 per thread, which has three 64-bit sums per column in registers.
_BLOCK: Final = 4096
_NUM_WARPS: Final = 16


@triton.jit  # type: ignore[untyped-decorator]
def _ordered(value: tl.tensor) -> tl.tensor:
    """Map float32 to uint32 with the same order; NaN is the largest."""
    bits = value.to(tl.uint32, bitcast=True)
    ordered = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(value == value, ordered, 0xFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _unordered(ordered: tl.tensor) -> tl.tensor:
    """Apply the inverse of `_ordered`."""
    bits = tl.where((ordered >> 31) != 0, ordered & 0x7FFFFFFF, ordered ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _counted(value: tl.tensor) -> tl.tensor:
    """Return a probability, with NaN and infinity replaced by 0."""
    return tl.where((value > 0.0) & (value < float("inf")), value, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _bound_kernel(
    x: tl.tensor,
    targets: tl.tensor,
    bounds: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    unit_bits: tl.tensor,
    BY_SHARE: tl.constexpr,  # noqa: N803  # Triton's convention for compile-time constants
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Find the bound of row r: the largest number such that the row's numbers >= bound reach the target.

    Program r computes row r. The target is `targets[r]`, a count or a share of the row's sum. Count and share decrease
    as the bound increases. A search therefore finds the bound's 32 bits from the highest bit on, with two bits in each
    pass over the row. Probabilities are added as integers, so the order of additions does not change the sum. The unit
    is 2**-unit_bits times the power of two above the largest probability.
    """
    row = tl.program_id(0)
    x += row.to(tl.int64) * row_stride  # a row's offset may exceed 2**31 elements
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    scale = 1.0
    has_bound = True
    if BY_SHARE:
        largest = tl.zeros([BLOCK], tl.float32)
        num_nan = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            value = tl.load(x + start + columns, mask=start + columns < vocab_size, other=0.0)
            largest = tl.maximum(largest, _counted(value))
            num_nan += (value != value).to(tl.int32)
        top = tl.max(largest, axis=0)
        exponent = (top.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - 127
        # The scale is at most 2**126, the limit of float32. Rows whose largest probability is below 2**-64 have larger
        # units.
        scale_bits = tl.minimum(unit_bits - 1 - exponent, 126) + 127
        scale = (scale_bits << 23).to(tl.float32, bitcast=True)
        units = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            value = tl.load(x + start + columns, mask=start + columns < vocab_size, other=0.0)
            units += (_counted(value) * scale).to(tl.int64)
        target *= tl.sum(units, axis=0).to(tl.float64)
        has_bound = (top > 0.0) & (tl.sum(num_nan, axis=0) == 0)
    one = tl.full((), 1, tl.uint32)
    low = tl.full((), 0, tl.uint32)
    for digit in range(16):
        step = one << (30 - 2 * digit)
        first, second, third = low + step, low + step * 2, low + step * 3
        from_first = tl.zeros([BLOCK], tl.int64)
        from_second = tl.zeros([BLOCK], tl.int64)
        from_third = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            inside = start + columns < vocab_size
            value = tl.load(x + start + columns, mask=inside, other=0.0)
            ordered = _ordered(value)
            weight = (_counted(value) * scale).to(tl.int64) if BY_SHARE else inside.to(tl.int64)
            from_first += tl.where(ordered >= first, weight, 0)
            from_second += tl.where(ordered >= second, weight, 0)
            from_third += tl.where(ordered >= third, weight, 0)
        suffices = (tl.sum(from_first, axis=0).to(tl.float64) >= target).to(tl.uint32)
        suffices += (tl.sum(from_second, axis=0).to(tl.float64) >= target).to(tl.uint32)
        suffices += (tl.sum(from_third, axis=0).to(tl.float64) >= target).to(tl.uint32)
        low += step * suffices
    tl.store(bounds + row, tl.where(has_bound, _unordered(low), 0.0))


def kth_largest(x: Tensor, k: Tensor) -> Tensor:
    """Return each row's k-th largest number, float32 [n]. A NaN counts as the largest.

    Args:
        x: float32 [n, V], any row stride, column stride 1.
        k: float64 [n], integers from 1 to V.

    Raises:
        ValueError: x is not float32, or its column stride is not 1.
    """
    return _bounds(x, k, by_share=False)


def top_p_bounds(probs: Tensor, top_p: Tensor) -> Tensor:
    """Return each row's top-p bound, float32 [n]: the lowest probability in the smallest set whose sum reaches top_p.

    For a vocabulary of V = 2**17 tokens, the error of a sum is at most V * 2**-45 times the row's largest probability.
    The bound of a row with NaN, or with only zeros, is 0.

    Args:
        probs: float32 [n, V], not negative; any row stride, column stride 1.
        top_p: float64 [n], 0 < top_p <= 1.

    Raises:
        ValueError: probs is not float32, or its column stride is not 1.
    """
    return _bounds(probs, top_p, by_share=True)


def _bounds(x: Tensor, targets: Tensor, by_share: bool) -> Tensor:
    if x.dtype != torch.float32 or x.stride(1) != 1:
        raise ValueError(f"bounds need float32 with columns of stride 1, got {x.dtype}, strides {x.stride()}")
    bounds = x.new_empty(len(x))
    if len(x) == 0:
        return bounds
    kernel: Any = _bound_kernel
    vocab_size = x.shape[1]
    kernel[(len(x),)](
        x,
        targets,
        bounds,
        x.stride(0),
        vocab_size,
        62 - (vocab_size - 1).bit_length(),  # a row's sum is then at most 2**62
        BY_SHARE=by_share,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,  # explicit, because Triton warns that its default will change
    )
    return bounds
