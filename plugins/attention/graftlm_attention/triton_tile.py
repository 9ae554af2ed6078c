"""The inner loop of the Triton kernels: a tile of queries attends over a range of one request's paged context."""

from typing import Any

import triton
import triton.language as tl

__all__ = ["attend_range", "read_scales"]


@triton.jit  # type: ignore[untyped-decorator]
def read_scales(scales: tl.tensor, there: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return scales as float32, 0 where not `inside`; `scales` points at the bits of bfloat16 numbers."""
    bits = tl.load(scales + there, mask=inside, other=0)
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
    """Attend to positions start .. end - 1 by online softmax in base 2; return the new acc, peak and total.

    Scores are kept times log2(e), so that exp2, one instruction, takes the place of exp at no cost.

    Args:
        acc: float32 [M, BLOCK_D], the values mixed so far, times `total`.
        peak: float32 [M], the largest score so far; -inf before the first.
        total: float32 [M], the sum of exp2(score - peak) so far.
        q: [M, BLOCK_D], zero past HEAD_DIM.
        q_positions: int32 [M].
        start, end: of the range. Not MASKED, it is a multiple of BLOCK_N long, and every query sees all of it.
        keys, values: the first element of the key/value head in slot 0; a slot is `slot_stride` elements.
        key_scales, value_scales: None, or for int8 codes the bits of the key/value head's scale in slot 0; a slot is
            slot_stride / HEAD_DIM of them.
        pages: the request's row of the page table.
        score_scale: turns q·k into scores; with a cap, into what tanh takes.
        cap_scale: None, or what tanh is multiplied by.
        WINDOW: None, or how many tokens a query sees.
        MASKED: whether queries see parts of the range only. Every position of it is seen by some query all the same:
            nothing else is read.
    """
    dims = tl.arange(0, BLOCK_D)
    WHOLE: tl.constexpr = not MASKED and HEAD_DIM == BLOCK_D  # noqa: N806
    for first in range(start, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        inside = positions < end
        # PAGE_SIZE is known when compiling: a shift, or a multiplication where it is no power of two.
        page = tl.load(pages + positions // PAGE_SIZE, mask=inside, other=0)
        # Bytes of a cache exceed 2**31, so must offsets.
        slots = page.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        rows = slots * slot_stride
        k_rows = keys + rows[None, :] + dims[:, None]  # [D, N]
        k = tl.load(k_rows) if WHOLE else tl.load(k_rows, mask=inside[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        # tf32x3: float32, of which tensor cores take only parts, in three products; for other types it means nothing.
        scores = tl.dot(q, k.to(q.dtype), input_precision="tf32x3") * score_scale  # [M, N]
        if key_scales is not None:  # codes are small integers, exact in every type; one product does for D of them
            scores *= read_scales(key_scales, slots * (slot_stride // HEAD_DIM), inside)[None, :]
        if cap_scale is not None:
            scores = cap_scale * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh, and no overflow
        if MASKED:
            visible = positions[None, :] <= q_positions[:, None]
            if WINDOW is not None:
                visible &= positions[None, :] > q_positions[:, None] - WINDOW
            scores = tl.where(visible & inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = new_peak
        if MASKED and WINDOW is not None:
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a query that has seen nothing yet
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
