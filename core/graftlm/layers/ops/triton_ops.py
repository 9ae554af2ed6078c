"""The operations between matrix products on a CUDA device, each in one launch of a Triton kernel.

Importing this module imports Triton, which only CUDA devices need.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftlm.errors import InvariantError
from graftlm.layers.ops.torch_ops import TorchOps

__all__ = ["TritonOps"]

_SILU: Final = 0
_GELU_TANH: Final = 1
_ACTIVATIONS: Final = {"silu": _SILU, "swish": _SILU, "gelu_pytorch_tanh": _GELU_TANH}

#: Number of columns that one program of the activation kernel computes.
_ACT_BLOCK: Final = 1024
#: Maximum size of a row, which a norm's program keeps in registers; PyTorch normalises longer rows.
_MAX_ROW: Final = 1 << 15
#: Passed to every launch, because Triton warns if this option is left out: the option's default will change.
_FP_FUSION: Final = True


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,  # noqa: N803  # Triton's convention for what is known when compiling
    WEIGHT_LAST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Normalise one row; program r normalises head r % H of token r // H. Results are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    value = tl.load(x + token * token_stride + head * head_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        stream = tl.load(residual + row * size + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + stream.to(tl.float32)).to(value.dtype)
        tl.store(total + row * size + columns, value, mask=inside)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    scale = tl.load(weight + head * size + columns, mask=inside, other=0.0)
    if WEIGHT_LAST:  # as in Llama; otherwise the product with the weight is rounded only once, as in Gemma
        normed = normed.to(value.dtype).to(tl.float32)
    normed = normed * scale.to(tl.float32)
    tl.store(out + row * size + columns, normed.to(value.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    head_dim: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Rotate one head; program r rotates head r % H of token r // H. The result is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    columns = tl.arange(0, BLOCK)
    inside = columns < head_dim
    half = head_dim // 2
    partner = tl.where(columns < half, columns + half, columns - half)
    start = heads + token * token_stride + head * head_stride
    value = tl.load(start + columns, mask=inside, other=0.0)
    other = tl.load(start + partner, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * head_dim + columns, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * head_dim + columns, mask=inside, other=0.0).to(tl.float32)
    turned = (value.to(tl.float32) * cosine).to(value.dtype).to(tl.float32) + other * sine
    tl.store(out + row * head_dim + columns, turned.to(value.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _act_and_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    ACT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Activate and multiply one block of columns of one row; program (t, b) computes block b of row t."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    exponent = wide
    if ACT == 1:  # 0.5 x (1 + tanh u) = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        exponent = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    active = (wide / (1.0 + tl.exp(-exponent))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + columns, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)


class TritonOps:
    """`LayerOps` with Triton kernels, in any floating dtype; `TorchOps` computes the cases that they do not support."""

    def __init__(self) -> None:
        self._torch = TorchOps()

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalise the sum; see `LayerOps`.

        Raises:
            InvariantError: the shapes are inconsistent.
        """
        size = weight.numel()
        fits = x.stride(-1) == 1 and (residual is None or (residual.is_contiguous() and residual.dtype is x.dtype))
        if not fits or size > _MAX_ROW:
            return self._torch.add_rms_norm(x, residual, weight, eps)
        if x.shape[-1] != size or (residual is not None and residual.shape != x.shape):
            raise InvariantError(f"got weights of {list(weight.shape)} for values of {list(x.shape)}")
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = x if residual is None else torch.empty_like(out)
        _launch_norm(x.unsqueeze(1), residual, weight, out, total, eps)
        return out, total

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise each head; see `LayerOps`.

        Raises:
            InvariantError: the shapes are inconsistent.
        """
        if heads.stride(-1) != 1:
            return self._torch.head_norm(heads, weight, eps)
        if weight.shape != heads.shape[1:]:
            raise InvariantError(f"got weights of {list(weight.shape)} for heads of {list(heads.shape)}")
        out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        _launch_norm(heads, None, weight, out, out, eps)
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads by their positions; see `LayerOps`.

        Raises:
            InvariantError: the shapes are inconsistent.
        """
        if heads.stride(-1) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
            return self._torch.rotate(heads, cos, sin)
        num_tokens, num_heads, head_dim = heads.shape
        if head_dim % 2 or not cos.numel() == sin.numel() == num_tokens * head_dim:
            raise InvariantError(f"got cosines of {list(cos.shape)} for heads of {list(heads.shape)}")
        out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        if num_tokens:
            kernel: Any = _rotate_kernel
            kernel[(num_tokens * num_heads,)](
                heads, cos, sin, out, heads.stride(0), heads.stride(1), num_heads, head_dim,
                BLOCK=triton.next_power_of_2(head_dim), num_warps=1, enable_fp_fusion=_FP_FUSION,
            )  # fmt: skip
        return out

    def act_and_mul(self, gate_up: Tensor, hidden_act: str) -> Tensor:
        """Activate gates and multiply them with the other half; see `LayerOps`.

        Raises:
            InvariantError: the last dimension is odd.
        """
        act = _ACTIVATIONS.get(hidden_act)
        if act is None or not gate_up.is_contiguous():
            return self._torch.act_and_mul(gate_up, hidden_act)
        num_rows, width = gate_up.shape
        if width % 2:
            raise InvariantError(f"expected as many gates as values that they gate, got {list(gate_up.shape)}")
        size = width // 2
        out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
        if num_rows:
            kernel: Any = _act_and_mul_kernel
            kernel[(num_rows, triton.cdiv(size, _ACT_BLOCK))](
                gate_up, out, size, ACT=act, BLOCK=_ACT_BLOCK, enable_fp_fusion=_FP_FUSION
            )
        return out

    def pack(self, weight: Tensor) -> None:
        """Return None, because products on a CUDA device read plain matrices; see `LayerOps`."""

    def pack_gates(self, weight: Tensor, hidden_act: str) -> None:
        """Return None, because products on a CUDA device read plain matrices; see `LayerOps`."""


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor, eps: float) -> None:
    """Normalise x [T, H, size] with the weight [H, size]; one program computes one row."""
    num_tokens, num_heads, size = x.shape
    if not num_tokens:
        return
    block = triton.next_power_of_2(size)
    kernel: Any = _rms_norm_kernel
    kernel[(num_tokens * num_heads,)](
        x, residual, weight.contiguous(), out, total, x.stride(0), x.stride(1), num_heads, size, eps,
        HAS_RESIDUAL=residual is not None, WEIGHT_LAST=weight.dtype is not torch.float32,
        BLOCK=block, num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=_FP_FUSION,
    )  # fmt: skip
