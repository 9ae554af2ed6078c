"""The operations with a recurrent state on a CUDA device: one kernel per operation for decode.

A kernel reads each state once and writes it once, without copies to a batch of states. Prompts use PyTorch's operations
in chunks, which are mostly matrix products. Importing this module imports Triton, which only CUDA devices need.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftlm.contracts import StateBatch
from graftlm.layers.state_ops.torch_scans import delta_chunks, ssd_chunks
from graftlm.layers.state_ops.torch_state_ops import conv_chunks

__all__ = ["TritonStateOps"]

#: Number of channels that one program of the convolution computes.
_CHANNELS: Final = 256
#: Maximum number of elements of a state that one program keeps in registers.
_TILE: Final = 4096
#: Passed to every launch, because Triton warns if this option is left out: the option's default will change.
_FP_FUSION: Final = True


@triton.jit  # type: ignore[untyped-decorator]
def _conv_step_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    x_stride: tl.tensor,
    num_channels: tl.tensor,
    KERNEL: tl.constexpr,  # noqa: N803  # Triton's convention for what is known when compiling
    HAS_BIAS: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Convolve one block of channels of one token; program (t, b) computes block b of token t."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < num_channels
    before = state + tl.load(sources + token) * (KERNEL - 1) * num_channels + channels
    after = state + tl.load(targets + token) * (KERNEL - 1) * num_channels + channels
    newest = tl.load(x + token * x_stride + channels, mask=inside, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + (KERNEL - 1) * num_channels + channels, mask=inside, other=0.0).to(
        tl.float32
    )
    for k in tl.static_range(KERNEL - 1):
        value = tl.load(before + k * num_channels, mask=inside, other=0.0)
        if k > 0:  # each element is read and written by the same thread, so a state may be updated in place
            tl.store(after + (k - 1) * num_channels, value, mask=inside)
        tap = tl.load(weight + k * num_channels + channels, mask=inside, other=0.0)
        total += value.to(tl.float32) * tap.to(tl.float32)
    tl.store(after + (KERNEL - 2) * num_channels, newest, mask=inside)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + token * num_channels + channels, total.to(newest.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _ssd_step_kernel(
    x: tl.tensor,
    log_decay: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    num_heads: tl.tensor,
    heads_per_group: tl.tensor,
    bc_stride: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    """Update some rows of one head's state; program (t, h, r) computes block r of head h of token t."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < size, columns < width
    inside = in_rows[:, None] & in_columns[None, :]
    at = head * size * width + rows[:, None] * width + columns[None, :]
    slot_size = num_heads * size * width
    decay = tl.exp(tl.load(log_decay + token * num_heads + head))
    value = tl.load(x + (token * num_heads + head) * size + rows, mask=in_rows, other=0.0)
    group_at = token * bc_stride + (head // heads_per_group) * width + columns
    to_state = tl.load(b + group_at, mask=in_columns, other=0.0)
    from_state = tl.load(c + group_at, mask=in_columns, other=0.0)
    matrix = tl.load(state + tl.load(sources + token) * slot_size + at, mask=inside, other=0.0)
    matrix = matrix * decay + value[:, None] * to_state[None, :]
    tl.store(state + tl.load(targets + token) * slot_size + at, matrix, mask=inside)
    total = tl.sum(matrix * from_state[None, :], axis=1)
    tl.store(out + (token * num_heads + head) * size + rows, total, mask=in_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _delta_step_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    num_heads: tl.tensor,
    heads_per_group: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    """Update some columns of one head's state; program (t, h, c) computes block c of head h of token t."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < key_size, columns < value_size
    inside = in_rows[:, None] & in_columns[None, :]
    at = head * key_size * value_size + rows[:, None] * value_size + columns[None, :]
    slot_size = num_heads * key_size * value_size
    decay = tl.exp(tl.load(log_decay + token * num_heads + head))
    rate = tl.load(beta + token * num_heads + head)
    group_at = (token * (num_heads // heads_per_group) + head // heads_per_group) * key_size + rows
    query = tl.load(q + group_at, mask=in_rows, other=0.0)
    key = tl.load(k + group_at, mask=in_rows, other=0.0)
    value = tl.load(v + (token * num_heads + head) * value_size + columns, mask=in_columns, other=0.0)
    matrix = tl.load(state + tl.load(sources + token) * slot_size + at, mask=inside, other=0.0) * decay
    known = tl.sum(matrix * key[:, None], axis=0)
    matrix += key[:, None] * (rate * (value - known))[None, :]
    tl.store(state + tl.load(targets + token) * slot_size + at, matrix, mask=inside)
    total = tl.sum(matrix * query[:, None], axis=0)
    tl.store(out + (token * num_heads + head) * value_size + columns, total, mask=in_columns)


class TritonStateOps:
    """`StateOps` with Triton kernels for decode segments, and PyTorch's operations for the others."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        """Convolve each channel with its latest K inputs; see `StateOps`."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_decodes, num_channels = batch.segments.num_decodes, x.shape[1]
        if num_decodes:
            kernel: Any = _conv_step_kernel
            kernel[(num_decodes, triton.cdiv(num_channels, _CHANNELS))](
                x, weight, weight if bias is None else bias, out, state, batch.sources, batch.targets,
                x.stride(0), num_channels, KERNEL=len(weight), HAS_BIAS=bias is not None, SILU=silu,
                BLOCK=_CHANNELS, enable_fp_fusion=_FP_FUSION,
            )  # fmt: skip
        conv_chunks(x, weight, bias, state, batch, out, silu=silu)
        return out

    def ssd_scan(self, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        """Compute the scan of Mamba 2; see `StateOps`."""
        num_heads, size = x.shape[1:]
        num_groups, width = b.shape[1:]
        x, log_decay = x.contiguous(), log_decay.contiguous()
        if not (b.stride() == c.stride() and b.stride()[1:] == (width, 1)):
            b, c = b.contiguous(), c.contiguous()
        out, num_decodes = torch.empty_like(x), batch.segments.num_decodes
        if num_decodes:
            columns = triton.next_power_of_2(width)
            rows = min(triton.next_power_of_2(size), max(_TILE // columns, 1))
            kernel: Any = _ssd_step_kernel
            kernel[(num_decodes, num_heads, triton.cdiv(size, rows))](
                x, log_decay, b, c, out, state, batch.sources, batch.targets,
                num_heads, num_heads // num_groups, b.stride(0), size, width,
                ROWS=rows, COLUMNS=columns, enable_fp_fusion=_FP_FUSION,
            )  # fmt: skip
        ssd_chunks(x, log_decay, b, c, state, batch, out)
        return out

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
    ) -> Tensor:
        """Compute the gated delta rule; see `StateOps`."""
        num_heads, value_size = v.shape[1:]
        num_groups, key_size = k.shape[1:]
        q, k, v, log_decay, beta = (tensor.contiguous() for tensor in (q, k, v, log_decay, beta))
        out, num_decodes = torch.empty_like(v), batch.segments.num_decodes
        if num_decodes:
            rows = triton.next_power_of_2(key_size)
            columns = min(triton.next_power_of_2(value_size), max(_TILE // rows, 1))
            kernel: Any = _delta_step_kernel
            kernel[(num_decodes, num_heads, triton.cdiv(value_size, columns))](
                q, k, v, log_decay, beta, out, state, batch.sources, batch.targets,
                num_heads, num_heads // num_groups, key_size, value_size,
                ROWS=rows, COLUMNS=columns, enable_fp_fusion=_FP_FUSION,
            )  # fmt: skip
        delta_chunks(q, k, v, log_decay, beta, state, batch, out)
        return out
