"""The Triton kernel for chunks: one launch computes the attention of the new tokens of many requests."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftlm.contracts import ForwardBatch
from graftlm.layers import CacheRows
from graftlm_attention.triton_kv_write import scale_bits
from graftlm_attention.triton_shapes import TileShape
from graftlm_attention.triton_tile import attend_range

__all__ = ["attend_chunks", "map_tiles"]

_MAP_BLOCK = 128


@triton.jit(do_not_specialize=["num_decodes"])  # type: ignore[untyped-decorator]
def _map_kernel(
    tile_requests: tl.tensor,
    cu_seqlens_q: tl.tensor,
    num_decodes: tl.tensor,
    TILE_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Write the index of request num_decodes + program_id(0) to the entries of the request's tiles."""
    chunk = tl.program_id(0)
    request = num_decodes + chunk
    start = (tl.load(cu_seqlens_q + request) - num_decodes) // TILE_TOKENS + chunk
    end = (tl.load(cu_seqlens_q + request + 1) - num_decodes) // TILE_TOKENS + chunk + 1
    for first in range(start, end, BLOCK):
        tiles = first + tl.arange(0, BLOCK)
        tl.store(tile_requests + tiles, tl.zeros([BLOCK], tl.int32) + request, mask=tiles < end)


@triton.jit(do_not_specialize=["num_decodes", "table_stride"])  # type: ignore[untyped-decorator]
def _extend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    out: tl.tensor,
    page_table: tl.tensor,
    cu_seqlens_q: tl.tensor,
    seq_lens: tl.tensor,
    tile_requests: tl.tensor,
    sinks: tl.tensor,
    num_decodes: tl.tensor,
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
    """Compute attention of one tile of queries for key/value head program_id(1).

    Row r of a tile is query head r % GROUP of token r // GROUP. All rows read the same keys.
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP  # noqa: N806
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # starts with a chunk's last tokens, whose context is the longest
    kv_head = tl.program_id(1)
    request = tl.load(tile_requests + tile)
    first_token = tl.load(cu_seqlens_q + request)
    query_len = tl.load(cu_seqlens_q + request + 1) - first_token
    chunk = request - num_decodes
    first_query = (tile - (first_token - num_decodes) // TILE_TOKENS - chunk) * TILE_TOKENS
    if first_query >= query_len:
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    end_query = tl.minimum(first_query + TILE_TOKENS, query_len)
    row_inside = rows < (end_query - first_query) * GROUP
    query = tl.minimum(first_query + rows // GROUP, end_query - 1)  # padding rows repeat the last query's position
    head = kv_head * GROUP + rows % GROUP
    inside = row_inside[:, None] & (dims < HEAD_DIM)[None, :]
    token = (first_token + query).to(tl.int64)
    q_tile = tl.load(q + (token * q_token_stride + head * q_head_stride)[:, None] + dims[None, :], mask=inside, other=0)

    past = tl.load(seq_lens + request) - query_len
    q_positions = past + query
    first_position = past + first_query
    end = past + end_query

    # The tile's context, [start, end): all queries attend to its middle part, only some to its first and last part.
    #
    #     start ─ masked ─ full_start ─────── not masked ─────── full_end ─ masked ─ end
    #
    # The sliding window masks the first part, and causality masks the last part.
    start = 0
    full_start = 0
    if WINDOW is not None:
        start = tl.maximum(0, first_position - WINDOW + 1)
        hidden = tl.maximum(0, end - WINDOW - start)
        full_start = tl.minimum(start + tl.cdiv(hidden, BLOCK_N) * BLOCK_N, end)
    full_end = full_start + tl.maximum(0, first_position + 1 - full_start) // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if sinks is None:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        peak = tl.load(sinks + head, mask=row_inside, other=0.0) * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    slot_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    pages = page_table + request.to(tl.int64) * table_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    if WINDOW is not None:
        acc, peak, total = attend_range(
            acc, peak, total, q_tile, q_positions, start, full_start, keys, values, key_scales, value_scales, pages,
            slot_stride,
            score_scale, cap_scale, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, WINDOW, True,
        )  # fmt: skip
    acc, peak, total = attend_range(
        acc, peak, total, q_tile, q_positions, full_start, full_end, keys, values, key_scales, value_scales, pages,
            slot_stride,
        score_scale, cap_scale, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, WINDOW, False,
    )  # fmt: skip
    acc, peak, total = attend_range(
        acc, peak, total, q_tile, q_positions, full_end, end, keys, values, key_scales, value_scales, pages,
            slot_stride,
        score_scale, cap_scale, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, WINDOW, True,
    )  # fmt: skip
    offsets = (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out + offsets[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def map_tiles(batch: ForwardBatch, tile_tokens: int) -> Tensor:
    """Return, for each tile of queries, the index of its request. Makes one launch; does not wait for the device.

    The tiles of chunk c start at (number of tokens in chunks before c) // tile_tokens + c, and end where the tiles of
    chunk c + 1 start. Therefore no prefix sum over the chunks' numbers of tiles is needed, the total number of tiles
    follows from shapes, and at most one tile per chunk is empty.

    Args:
        batch: a batch with at least one chunk.
        tile_tokens: number of tokens in a tile.

    Returns: int32 [tiles], on the batch's device.
    """
    num_chunks = batch.num_requests - batch.num_decodes
    num_tiles = (batch.num_tokens - batch.num_decodes) // tile_tokens + num_chunks
    tile_requests = torch.empty(num_tiles, dtype=torch.int32, device=batch.seq_lens.device)
    kernel: Any = _map_kernel
    kernel[(num_chunks,)](
        tile_requests,
        batch.cu_seqlens_q,
        batch.num_decodes,
        TILE_TOKENS=tile_tokens,
        BLOCK=_MAP_BLOCK,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return tile_requests


def attend_chunks(
    q: Tensor,
    keys: CacheRows,
    values: CacheRows,
    out: Tensor,
    batch: ForwardBatch,
    page_table: Tensor,
    tile_requests: Tensor,
    shape: TileShape,
    *,
    page_size: int,
    window: int | None,
    score_scale: float,
    cap_scale: float | None,
    sinks: Tensor | None = None,
) -> None:
    """Compute attention of all requests after the first `num_decodes`, and write their rows of `out`.

    Args:
        q: [T, H, D]; the last dimension is contiguous.
        keys, values: [slots, H_kv, D], contiguous; this step's tokens are already written.
        out: [T, H * D], contiguous, q's dtype.
        batch: the step's batch.
        page_table: int32 [B, P]; its rows are contiguous.
        tile_requests: result of `map_tiles`, for tiles of `shape`.
        shape: result of `extend_shape`.
        page_size: number of tokens in a page.
        window: sliding window in tokens, or None.
        score_scale, cap_scale: see `attend_range`.
        sinks: float32 [H]: for each head, the score of a virtual token whose value is zero.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = keys.stored.shape[1]
    kernel: Any = _extend_kernel
    kernel[(len(tile_requests), num_kv_heads)](
        q,
        keys.stored,
        values.stored,
        scale_bits(keys),
        scale_bits(values),
        out,
        page_table,
        batch.cu_seqlens_q,
        batch.seq_lens,
        tile_requests,
        sinks,
        batch.num_decodes,
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
