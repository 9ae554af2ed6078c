"""Root-mean-square normalisation (arXiv:1910.07467), of hidden states and of attention heads.

The mean square is computed in float32. Later operations round in the order of Hugging Face's models, so that bfloat16
gives the same numbers. The normalised values are cast before the product with the weight; in Gemma, the product is
cast.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from graftlm.layers.ops import LayerOps, TorchOps
from graftlm.layers.weights import WeightSlot, empty_parameter

__all__ = ["GemmaQKNorm", "GemmaRMSNorm", "QKNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """Normalises hidden states, after adding them to the residual stream.

    Args:
        size: size of the last dimension.
        eps: number that is added to the mean square.
        device, dtype: device and dtype of the weight.
    """

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._eps = eps
        self.ops: LayerOps = TorchOps()
        self.weight = empty_parameter(size, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalise the sum.

        Args:
            x: [T, size], the output of the previous layer.
            residual: [T, size], the stream so far; None: x starts the stream.

        Returns: (normalised [T, size], the new residual stream [T, size]).
        """
        return self.ops.add_rms_norm(x, residual, self.weight, self._eps)

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that normalise."""
        self.ops = ops

    def weight_slots(self, prefix: str, name: str) -> Iterator[WeightSlot]:
        """Yield the slot of `{prefix}{name}.weight`."""
        yield WeightSlot(f"{prefix}{name}.weight", self.weight)


class QKNorm(nn.Module):
    """Normalises each query and key head separately, in one pass over all heads.

    The checkpoint has one weight for queries and one for keys, called `names`; the parameter has one row per head.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        names: tuple[str, str] = ("q_norm", "k_norm"),
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._names = names
        self._num_heads = num_heads
        self._eps = eps
        self.ops: LayerOps = TorchOps()
        self.weight = empty_parameter(num_heads + num_kv_heads, head_dim, device=device, dtype=dtype)

    def forward(self, qk: Tensor) -> Tensor:
        """Normalise [T, H + H_kv, D], query heads first."""
        return self.ops.head_norm(qk, self.weight, self._eps)

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that normalise."""
        self.ops = ops

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of `{prefix}{name}.weight`, both [D]."""
        q_name, k_name = self._names
        yield WeightSlot(f"{prefix}{q_name}.weight", self.weight[: self._num_heads], per_row=True)
        yield WeightSlot(f"{prefix}{k_name}.weight", self.weight[self._num_heads :], per_row=True)


class GemmaRMSNorm(nn.Module):
    """Normalises hidden states in Gemma's way: the factor is the checkpoint's weight plus 1, in float32.

    Args:
        size: size of the last dimension.
        eps: number that is added to the mean square.
        device: device of the weight, which is float32 for every dtype of the model.
    """

    def __init__(self, size: int, eps: float, *, device: torch.device) -> None:
        super().__init__()
        self._eps = eps
        self.ops: LayerOps = TorchOps()
        self.weight = empty_parameter(size, device=device, dtype=torch.float32)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalise the sum; see `RMSNorm.forward`."""
        return self.ops.add_rms_norm(x, residual, self.weight, self._eps)

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that normalise."""
        self.ops = ops

    def weight_slots(self, prefix: str, name: str) -> Iterator[WeightSlot]:
        """Yield the slot of `{prefix}{name}.weight`."""
        yield WeightSlot(f"{prefix}{name}.weight", self.weight, offset=1.0)


class GemmaQKNorm(nn.Module):
    """Normalises each query and key head separately with Gemma's weights; see `QKNorm`."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, device: torch.device) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._eps = eps
        self.ops: LayerOps = TorchOps()
        self.weight = empty_parameter(num_heads + num_kv_heads, head_dim, device=device, dtype=torch.float32)

    def forward(self, qk: Tensor) -> Tensor:
        """Normalise [T, H + H_kv, D], query heads first."""
        return self.ops.head_norm(qk, self.weight, self._eps)

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that normalise."""
        self.ops = ops

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of `{prefix}q_norm.weight` and `{prefix}k_norm.weight`, both [D]."""
        yield WeightSlot(f"{prefix}q_norm.weight", self.weight[: self._num_heads], per_row=True, offset=1.0)
        yield WeightSlot(f"{prefix}k_norm.weight", self.weight[self._num_heads :], per_row=True, offset=1.0)
