"""The Triton kernel that applies bitmasks: it sets the scores of forbidden tokens to -inf.

Import this module only for scores on a GPU, because it imports Triton.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["forbid_in_place"]

#: Number of columns of one program, which is 32 words of a mask. The kernel only writes scores, so larger blocks are
#: not faster.
_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _forbid_kernel(
    scores: tl.tensor,
    rows: tl.tensor,
    bits: tl.tensor,
    scores_stride: tl.tensor,
    bits_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803  # Triton's convention for compile-time constants
) -> None:
    """Mask one block of columns of one row; program (i, b) masks block b of row rows[i]."""
    idx = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    # The 32 columns of a warp have one word of the mask, which is loaded once and broadcast.
    words = tl.load(bits + idx * bits_stride + columns // 32, mask=inside, other=-1)
    forbidden = ((words >> (columns % 32)) & 1) == 0
    row = tl.load(rows + idx).to(tl.int64)  # a row's offset may exceed 2**31 elements
    tl.store(scores + row * scores_stride + columns, float("-inf"), mask=inside & forbidden)


def forbid_in_place(scores: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the scores of all forbidden tokens to -inf, in one kernel launch that does not read scores.

    Args:
        scores: any floating dtype [n, V], any row stride, column stride 1; changed in place.
        rows: int64 [m], unique rows of `scores`.
        bits: int32 [m, ceil(V / 32)], see `TokenMask`; word stride 1.

    All tensors must be on one device.

    Raises:
        ValueError: the columns of `scores` or the words of `bits` do not have stride 1.
    """
    if scores.stride(1) != 1 or bits.stride(1) != 1:
        strides = f"scores {tuple(scores.stride())}, bits {tuple(bits.stride())}"
        raise ValueError(f"masks need columns of stride 1, got strides {strides}; pass contiguous tensors")
    if len(rows) == 0:
        return
    kernel: Any = _forbid_kernel
    num_columns = scores.shape[1]
    grid = (len(rows), triton.cdiv(num_columns, _BLOCK))
    kernel[grid](
        scores,
        rows,
        bits,
        scores.stride(0),
        bits.stride(0),
        num_columns,
        BLOCK=_BLOCK,
        enable_fp_fusion=True,  # explicit, because Triton warns that its default will change
    )
