"""The operations between matrix products in PyTorch, for all devices and dtypes; the reference of other classes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlm.layers.activation import activation
from graftlm.layers.packing import PackedMatrix, pack_for_onednn

__all__ = ["TorchOps"]


class TorchOps:
    """`LayerOps` in elementary operations."""

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalise the sum; see `LayerOps`."""
        if residual is not None:
            x = residual + x
        return _rms_norm(x, weight, eps), x

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise each head; see `LayerOps`."""
        return _rms_norm(heads, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads by their positions; see `LayerOps`."""
        return (heads * cos).addcmul_(heads.roll(heads.shape[-1] // 2, -1), sin)

    def act_and_mul(self, gate_up: Tensor, hidden_act: str) -> Tensor:
        """Activate gates and multiply them with the other half; see `LayerOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(hidden_act)(gate).mul_(up)

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """Return a weight matrix in oneDNN's layout if that is faster; see `LayerOps`."""
        return pack_for_onednn(weight)

    def pack_gates(self, weight: Tensor, hidden_act: str) -> None:
        """Return None, because products are written before they are activated; see `LayerOps`."""


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype is torch.float32:
        return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight
