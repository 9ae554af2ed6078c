"""The Triton kernel that writes a batch's keys and values into their slots."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_kv"]

#: The largest number of float8_e4m3fn. What is larger saturates: the type has no infinity, and NaN would spread.
_E4M3_MAX = tl.constexpr(448.0)


@triton.jit  # type: ignore[untyped-decorator]
def _convert(numbers: Any, dtype: tl.constexpr) -> Any:
    """Convert to the cache's type; NaN stays NaN."""
    if dtype == tl.float8e4nv:
        numbers = tl.clamp(numbers.to(tl.float32), -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return numbers.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _write_kernel(
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    out_slots: Any,
    k_token_stride: Any,
    k_head_stride: Any,
    v_token_stride: Any,
    v_head_stride: Any,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_H: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
) -> None:
    """Write token program_id(0)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    slot = tl.load(out_slots + token)
    there = slot * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM + dims
    key = tl.load(k + token * k_token_stride + heads * k_head_stride + dims, mask=inside)
    value = tl.load(v + token * v_token_stride + heads * v_head_stride + dims, mask=inside)
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
    kernel: Any = _write_kernel
    kernel[(num_tokens,)](
        k,
        v,
        keys,
        values,
        out_slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
