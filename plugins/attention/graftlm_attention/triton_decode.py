"""The Triton kernels for one-token requests: pieces of a context are computed in parallel, then merged."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftlm.layers import CacheRows
from graftlm_attention.triton_kv_write import scale_bits
from graftlm_attention.triton_shapes import ContextSplits, TileShape
from graftlm_attention.triton_tile import attend_range

__all__ = ["attend_decodes"]


@triton.jit  # type: ignore[untyped-decorator]
def _split_tokens(
    seen: tl.tensor,
    num_splits: tl.tensor,
    min_tokens: tl.tensor,
    BLOCK_N: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Return the number of tokens in each piece of a context of `seen` tokens."""
    return tl.maximum(min_tokens, tl.cdiv(tl.cdiv(seen, num_splits), BLOCK_N) * BLOCK_N)


@triton.jit(do_not_specialize=["num_splits", "min_tokens", "table_stride"])  # type: ignore[untyped-decorator]
def _decode_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    num_splits: tl.tensor,
    min_tokens: tl.tensor,
    table_stride: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    score_scale: tl.tensor,
    cap_scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    PAGE_SIZE: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
) -> None:
    """Compute attention of the query heads of one key/value head over one piece of one request's context.

    Program (b, h, s) computes request b, key/value head h and piece s. If `lse` is given, the piece's result is stored
    in `out`, [B, splits, H, D], and the log2 of its softmax sum in `lse`. Otherwise there is one piece, and `out` is
    [B, H, D].
    """
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    end = tl.load(seq_lens + request)
    start = 0
    if WINDOW is not None:
        start = tl.maximum(0, end - WINDOW)
    length = _split_tokens(end - start, num_splits, min_tokens, BLOCK_N)
    start += split * length
    if (start >= end) & (split > 0):  # a short context has fewer pieces; _merge_kernel reads no other results
        return
    end = tl.minimum(end, start + length)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + rows
    inside = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = request * q_token_stride + head * q_head_stride
    q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=inside, other=0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=rows < GROUP, other=0.0) * 1.4426950408889634
        peak = tl.where(split == 0, sink, peak)  # the sink counts once per context
        total = tl.where(split == 0, 1.0, total)
    slot_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    pages = page_table + request * table_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    full_end = start + (end - start) // BLOCK_N * BLOCK_N
    q_positions = tl.zeros([BLOCK_M], tl.int32) + (end - 1)  # the query attends to all tokens of the piece
    acc, peak, total = attend_range(
        acc, peak, total, q_tile, q_positions, start, full_end, keys, values, key_scales, value_scales, pages,
        slot_stride,
        score_scale, cap_scale, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, None, False,
    )  # fmt: skip
    acc, peak, total = attend_range(
        acc, peak, total, q_tile, q_positions, full_end, end, keys, values, key_scales, value_scales, pages,
        slot_stride,
        score_scale, cap_scale, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, None, True,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # a padding row of a graph's batch has no context: its result is 0

    out_rows = request * (NUM_KV_HEADS * GROUP) + head
    if lse is not None:
        out_rows = (request * num_splits + split) * (NUM_KV_HEADS * GROUP) + head
        tl.store(lse + out_rows, peak + tl.log2(total), mask=rows < GROUP)
    mixed = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_rows[:, None] * HEAD_DIM + dims[None, :], mixed, mask=inside)


@triton.jit(do_not_specialize=["num_splits", "min_tokens"])  # type: ignore[untyped-decorator]
def _merge_kernel(
    partial: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    seq_lens: tl.tensor,
    num_splits: tl.tensor,
    min_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
) -> None:
    """Merge the pieces of request program_id(0) for query head program_id(1)."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seen = tl.load(seq_lens + request)
    if WINDOW is not None:
        seen = tl.minimum(seen, WINDOW)
    pieces = tl.cdiv(seen, _split_tokens(seen, num_splits, min_tokens, BLOCK_N))
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = float("-inf")
    total = 0.0
    for split in range(pieces):
        row = (request * num_splits + split) * NUM_HEADS + head
        piece_lse = tl.load(lse + row)
        piece = tl.load(partial + row * HEAD_DIM + dims, mask=inside, other=0.0)
        new_peak = tl.maximum(peak, piece_lse)
        decay = tl.exp2(peak - new_peak)
        weight = tl.exp2(piece_lse - new_peak)
        acc = acc * decay + piece * weight
        total = total * decay + weight
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)
    offsets = (request * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(out + offsets, (acc / total).to(out.dtype.element_ty), mask=inside)


def attend_decodes(
    q: Tensor,
    keys: CacheRows,
    values: CacheRows,
    out: Tensor,
    num_decodes: int,
    seq_lens: Tensor,
    page_table: Tensor,
    shape: TileShape,
    splits: ContextSplits,
    *,
    page_size: int,
    window: int | None,
    score_scale: float,
    cap_scale: float | None,
    sinks: Tensor | None = None,
) -> None:
    """Compute attention of the first `num_decodes` requests, which have one token each; write their rows of `out`.

    The launches depend only on shapes and `splits`, so a captured graph serves contexts of any length.

    Args:
        q: [T, H, D]; the last dimension is contiguous.
        keys, values: [slots, H_kv, D], contiguous; this step's tokens are already written.
        out: [T, H * D], contiguous, q's dtype.
        num_decodes: number of one-token requests, at least 1.
        seq_lens: int32 [B]; the result of an empty context is 0.
        page_table: int32 [B, P]; its rows are contiguous.
        shape: result of `decode_shape`.
        splits: result of `split_contexts`.
        page_size: number of tokens in a page.
        window: sliding window in tokens, or None.
        score_scale, cap_scale: see `attend_range`.
        sinks: see `attend_chunks`.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, num_splits = keys.stored.shape[1], splits.num_splits
    partial, lse = out, None
    if num_splits > 1:
        # Every layer allocates these tensors. The caching allocator returns the same memory each time. Graphs can
        # replay this, because each graph has its own memory pool.
        partial = torch.empty((num_decodes, num_splits, num_heads, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_decodes, num_splits, num_heads), dtype=torch.float32, device=q.device)
    kernel: Any = _decode_kernel
    kernel[(num_decodes, num_kv_heads, num_splits)](
        q,
        keys.stored,
        values.stored,
        scale_bits(keys),
        scale_bits(values),
        partial,
        lse,
        page_table,
        seq_lens,
        sinks,
        num_splits,
        splits.min_tokens,
        page_table.stride(0),
        q.stride(0),
        q.stride(1),
        score_scale,
        cap_scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        WINDOW=window,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_D=shape.block_d,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,
    )
    if lse is None:
        return
    merge: Any = _merge_kernel
    merge[(num_decodes, num_heads)](
        partial,
        lse,
        out,
        seq_lens,
        num_splits,
        splits.min_tokens,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        WINDOW=window,
        BLOCK_N=shape.block_n,
        BLOCK_D=shape.block_d,
        num_warps=2,
        enable_fp_fusion=True,
    )
