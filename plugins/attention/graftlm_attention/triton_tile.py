"""The inner loop of the Triton kernels: a tile of queries attends to a range of one request's paged context."""

from typing import Any

import triton
import triton.language as tl

__all__ = ["attend_range", "read_scales"]


@triton.jit  # type: ignore[untyped-decorator]
def read_scales(scales: tl.tensor, offsets: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return the scales at `offsets` as float32, 0 where not `inside`; `scales` points at bits of bfloat16 numbers."""
    bits = tl.load(scales + offsets, mask=inside, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def attend_range(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    q_positions: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    pages: tl.tensor,
    slot_stride: tl.tensor,
    score_scale: tl.tensor,
    cap_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    PAGE_SIZE: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
) -> Any:
    """Compute attention to positions start .. end - 1 by online softmax in base 2; return the new acc, peak and total.

    Scores are multiplied by log2(e), so that exp2 replaces exp at no cost; exp2 is one instruction.

    Args:
        acc: float32 [M, BLOCK_D], the weighted sum of values so far; the caller divides it by `total` at the end.
        peak: float32 [M], the largest score so far; -inf before the first.
        total: float32 [M], the sum of exp2(score - peak) so far.
        q: [M, BLOCK_D], zero past HEAD_DIM.
        q_positions: int32 [M], position of each query.
        start, end: the range of positions [start, end). Unless MASKED, its length is a multiple of BLOCK_N, and every
            query attends to all of its positions.
        keys, values: pointers to the first element of the key/value head in slot 0; a slot has `slot_stride` elements.
        key_scales, value_scales: None, or for int8 codes pointers to the bits of the key/value head's scale in slot 0;
            a slot has slot_stride / HEAD_DIM scales.
        pages: pointer to the request's row of the page table.
        score_scale: factor from q·k to scores; with a soft cap, factor from q·k to the argument of tanh.
        cap_scale: None, or the factor of tanh.
        WINDOW: None, or the number of tokens that a query attends to.
        MASKED: whether some queries attend to only a part of the range. At least one query attends to each position of
            the range; positions outside are not read.
    """
    dims = tl.arange(0, BLOCK_D)
    WHOLE: tl.constexpr = not MASKED and HEAD_DIM == BLOCK_D  # noqa: N806
    for first in range(start, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        inside = positions < end
        # PAGE_SIZE is a compile-time constant, so the division becomes a shift, or a multiplication if PAGE_SIZE is not
        # a power of two.
        page = tl.load(pages + positions // PAGE_SIZE, mask=inside, other=0)
        # A cache may have more than 2**31 elements, so offsets are 64-bit.
        slots = page.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        rows = slots * slot_stride
        k_rows = keys + rows[None, :] + dims[:, None]  # [D, N]
        k = tl.load(k_rows) if WHOLE else tl.load(k_rows, mask=inside[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        # tf32x3: tensor cores round float32 to TF32; three such products restore the precision. Only float32 uses it.
        scores = tl.dot(q, k.to(q.dtype), input_precision="tf32x3") * score_scale  # [M, N]
        if key_scales is not None:  # codes are exact in every dtype, so one product per score scales all D of them
            scores *= read_scales(key_scales, slots * (slot_stride // HEAD_DIM), inside)[None, :]
        if cap_scale is not None:
            scores = cap_scale * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh without overflow
        if MASKED:
            visible = positions[None, :] <= q_positions[:, None]
            if WINDOW is not None:
                visible &= positions[None, :] > q_positions[:, None] - WINDOW
            scores = tl.where(visible & inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = new_peak
        if MASKED and WINDOW is not None:
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # so far, all positions are masked for the query
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        if value_scales is not None:
            weights *= read_scales(value_scales, slots * (slot_stride // HEAD_DIM), inside)[None, :]
        v_rows = values + rows[:, None] + dims[None, :]  # [N, D]
        v = tl.load(v_rows) if WHOLE else tl.load(v_rows, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="tf32x3")
        peak = new_peak
    return acc, peak, total
