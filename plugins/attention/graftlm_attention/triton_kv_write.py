"""The Triton kernel that writes a batch's keys and values into their slots."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_kv"]

#: Elements of keys that one program writes, and as many of values.
_BLOCK = 2048
#: The largest number of float8_e4m3fn. What is larger saturates: the type has no infinity, and NaN would spread.
_E4M3_MAX = tl.constexpr(448.0)


@triton.jit  # type: ignore[untyped-decorator]
def _convert(numbers: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Convert to the cache's type; NaN stays NaN."""
    if dtype == tl.float8e4nv:
        numbers = tl.clamp(numbers.to(tl.float32), -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return numbers.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
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
    """Write block program_id(0) of rows; a row is one head of one token, and the heads of a token adjoin."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)[None, :]
    row_inside = row < num_rows
    inside = row_inside[:, None] & (dims < HEAD_DIM)
    token, head = (row // NUM_HEADS).to(tl.int64), row % NUM_HEADS
    slot = tl.load(out_slots + token, mask=row_inside, other=0)
    there = (slot * NUM_HEADS + head)[:, None] * HEAD_DIM + dims
    key = tl.load(k + (token * k_token_stride + head * k_head_stride)[:, None] + dims, mask=inside, other=0.0)
    value = tl.load(v + (token * v_token_stride + head * v_head_stride)[:, None] + dims, mask=inside, other=0.0)
    tl.store(keys + there, _convert(key, keys.dtype.element_ty), mask=inside)
    tl.store(values + there, _convert(value, values.dtype.element_ty), mask=inside)


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, out_slots: Tensor) -> None:
    """Write keys and values into slots, converted to the cache's dtype, in one launch.

    Args:
        k, v: [T, H_kv, D], any floating dtype; the last dimension is contiguous.
        keys, values: [slots, H_kv, D], contiguous, changed in place; of k's dtype or narrower. What float8_e4m3fn
            cannot hold becomes its largest number.
        out_slots: int64 [T].
    """
    num_tokens, num_heads, head_dim = k.shape
    block_d = triton.next_power_of_2(head_dim)
    block_rows = max(1, _BLOCK // block_d)
    kernel: Any = _write_kernel
    kernel[(triton.cdiv(num_tokens * num_heads, block_rows),)](
        k,
        v,
        keys,
        values,
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
        enable_fp_fusion=True,  # said, since Triton warns that what it does unasked will change
    )
