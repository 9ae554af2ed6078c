"""The Triton kernel that writes a batch's keys and values to their slots."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftlm.layers import CacheRows

__all__ = ["scale_bits", "write_kv"]

#: Number of elements of keys that one program writes, and number of elements of values.
_BLOCK = 2048
#: The largest number of float8_e4m3fn. Larger numbers are stored as this number: the type has no infinity, and a NaN
#: would make every later result of the request NaN.
_E4M3_MAX = tl.constexpr(448.0)
_INT8_MAX = tl.constexpr(127.0)
#: 1.5 * 2^23. Adding and subtracting it rounds a float32 to an integer, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit  # type: ignore[untyped-decorator]
def _convert(numbers: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Convert to the cache's type; NaN stays NaN."""
    if dtype == tl.float8e4nv:
        numbers = tl.clamp(numbers.to(tl.float32), -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return numbers.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(
    numbers: tl.tensor,
    rows: tl.tensor,
    scales: tl.tensor,
    row_ids: tl.tensor,
    dims: tl.tensor,
    row_inside: tl.tensor,
    inside: tl.tensor,
    HEAD_DIM: tl.constexpr,  # noqa: N803
) -> None:
    """Store numbers [R, D] in the cache rows `row_ids` [R]. If the cache has scales, store int8 codes and scales."""
    if scales is None:
        converted = _convert(numbers, rows.dtype.element_ty)
    else:
        numbers = numbers.to(tl.float32)
        largest = tl.max(tl.abs(numbers), 1)
        is_nan = tl.sum((numbers != numbers).to(tl.int32), 1) > 0
        bits = tl.div_rn(largest, tl.zeros_like(largest) + _INT8_MAX).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # rounds to bfloat16, ties to even
        bits = tl.where(is_nan, 0x7FC0, bits)
        scale = (bits << 16).to(tl.float32, bitcast=True)
        ratios = tl.div_rn(numbers, tl.zeros_like(numbers) + scale[:, None])
        ratios = tl.where(ratios == ratios, ratios, 0.0)
        ratios = tl.minimum(tl.maximum(ratios, -_INT8_MAX), _INT8_MAX)
        converted = ((ratios + _ROUNDER) - _ROUNDER).to(tl.int8)
        tl.store(scales + row_ids, bits.to(tl.int16), mask=row_inside)
    tl.store(rows + row_ids[:, None] * HEAD_DIM + dims, converted, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    out_slots: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    num_rows: tl.tensor,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
) -> None:
    """Write block program_id(0) of rows. A row is one head of one token; the heads of a token are consecutive rows."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)[None, :]
    row_inside = row < num_rows
    inside = row_inside[:, None] & (dims < HEAD_DIM)
    token, head = (row // NUM_HEADS).to(tl.int64), row % NUM_HEADS
    slot = tl.load(out_slots + token, mask=row_inside, other=0)
    row_ids = slot * NUM_HEADS + head
    key = tl.load(k + (token * k_token_stride + head * k_head_stride)[:, None] + dims, mask=inside, other=0.0)
    value = tl.load(v + (token * v_token_stride + head * v_head_stride)[:, None] + dims, mask=inside, other=0.0)
    _store_rows(key, keys, key_scales, row_ids, dims, row_inside, inside, HEAD_DIM)
    _store_rows(value, values, value_scales, row_ids, dims, row_inside, inside, HEAD_DIM)


def scale_bits(rows: CacheRows) -> Tensor | None:
    """Return the bits of a cache's bfloat16 scales as int16 [slots, H_kv]; None if the cache has no scales.

    Compiled and interpreted kernels both read bits, and not bfloat16 numbers.
    """
    return None if rows.scales is None else rows.scales.view(torch.int16)


def write_kv(k: Tensor, v: Tensor, keys: CacheRows, values: CacheRows, out_slots: Tensor) -> None:
    """Write keys and values to slots, converted to the cache's dtype, in one launch.

    Args:
        k, v: [T, H_kv, D], any floating dtype; the last dimension is contiguous.
        keys, values: [slots, H_kv, D], contiguous, changed in place. The dtype is k's or a narrower one.
            Numbers beyond the range of float8_e4m3fn become its largest number. int8 codes are stored with a scale per
            row.
        out_slots: int64 [T].
    """
    num_tokens, num_heads, head_dim = k.shape
    block_d = triton.next_power_of_2(head_dim)
    block_rows = max(1, _BLOCK // block_d)
    kernel: Any = _write_kernel
    kernel[(triton.cdiv(num_tokens * num_heads, block_rows),)](
        k,
        v,
        keys.stored,
        values.stored,
        scale_bits(keys),
        scale_bits(values),
        out_slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_tokens * num_heads,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=block_rows,
        BLOCK_D=block_d,
        enable_fp_fusion=True,  # set explicitly, because Triton warns that the default will change
    )
