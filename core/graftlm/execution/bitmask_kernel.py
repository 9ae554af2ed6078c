"""The Triton kernel that writes minus infinity where a bitmask allows no token.

Importing this module imports Triton; only rows on a device need it.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["forbid_in_place"]

#: Columns of one program: 32 words of a mask. The kernel only writes, so larger blocks gain nothing.
_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _forbid_kernel(
    scores: tl.tensor,
    rows: tl.tensor,
    bits: tl.tensor,
    scores_stride: tl.tensor,
    bits_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803  # Triton's convention for what is known when compiling
) -> None:
    """Clear one block of columns of one masked row; program (i, b) has row rows[i] and block b."""
    idx = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    # A warp's 32 columns are one word of the mask: one load, broadcast.
    words = tl.load(bits + idx * bits_stride + columns // 32, mask=inside, other=-1)
    forbidden = ((words >> (columns % 32)) & 1) == 0
    row = tl.load(rows + idx).to(tl.int64)  # a row's offset may exceed 2**31 elements
    tl.store(scores + row * scores_stride + columns, float("-inf"), mask=inside & forbidden)


def forbid_in_place(scores: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Write minus infinity into the scores of all tokens but the allowed ones, in one launch that reads no score.

    Args:
        scores: any floating dtype [n, V], any distance between rows, changed in place; the columns adjoin.
        rows: int64 [m], each once; rows of `scores`.
        bits: int32 [m, ceil(V / 32)], as in `TokenMask`; the words of a row adjoin.

    All are on one device.

    Raises:
        ValueError: columns of `scores` or words of `bits` do not adjoin.
    """
    if scores.stride(1) != 1 or bits.stride(1) != 1:
        strides = f"scores {tuple(scores.stride())}, bits {tuple(bits.stride())}"
        raise ValueError(f"masks are applied along adjoining columns: got strides {strides}; pass contiguous tensors")
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
        enable_fp_fusion=True,  # said, since Triton warns that what it does unasked will change
    )
