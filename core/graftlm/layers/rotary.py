"""Rotary position embedding (RoFormer, arXiv:2104.09864): the rotation of heads by their positions.

The two halves of a head are rotated against each other, like in Hugging Face's models:

    out = x * [cos, cos] + roll(x, R / 2) * [-sin, sin]

The first R of a head's D dimensions are rotated; in most models R is D.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graftlm.layers.ops import LayerOps, TorchOps
from graftlm.layers.rope_frequencies import Frequencies

__all__ = ["RotaryEmbedding", "Rotation", "frequency_bytes", "rotate"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a step's tokens by their positions.

    Attributes:
        cos: [T, 1, R].
        sin: [T, 1, R], the first half negated.
        ops: the operations that rotate.
    """

    cos: Tensor
    sin: Tensor
    ops: LayerOps

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate the first R dimensions of [T, heads, D], any strides; return all D dimensions, contiguous."""
        size = self.cos.shape[-1]
        if heads.shape[-1] == size:
            return self.ops.rotate(heads, self.cos, self.sin)
        return torch.cat([self.ops.rotate(heads[..., :size], self.cos, self.sin), heads[..., size:]], dim=-1)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.cos, self.sin))


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a step's positions, computed once per step for all layers.

    Computing them takes a few microseconds per step; a look-up table for a context of a million tokens would take half
    a gigabyte.

    Args:
        frequencies: the checkpoint's frequencies, from `rope_frequencies`.
        device: device of the positions.
        dtype: dtype of queries and keys. Angles are always float32.
    """

    inv_freq: Tensor
    sign: Tensor
    axes: Tensor

    def __init__(self, frequencies: Frequencies, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._scaling = frequencies.scaling
        self._dtype = dtype
        self.ops: LayerOps = TorchOps()
        ones = torch.full_like(frequencies.inv_freq, frequencies.scaling)
        inv_freq = torch.cat([frequencies.inv_freq, frequencies.inv_freq]).to(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("sign", torch.cat([-ones, ones]).to(device), persistent=False)
        axes = frequencies.axes or (0,) * len(ones)
        self.register_buffer("axes", torch.tensor((*axes, *axes), device=device), persistent=False)

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that rotate."""
        self.ops = ops

    def forward(self, positions: Tensor) -> Rotation:
        """Return the rotation of positions, int64 [T]; or [3, T], if the frequencies have axes."""
        if positions.ndim == 1:
            angles = positions.view(-1, 1, 1) * self.inv_freq
        else:
            angles = positions.index_select(0, self.axes).T.unsqueeze(1) * self.inv_freq
        cos = angles.cos()
        if self._scaling != 1.0:
            cos *= self._scaling
        return Rotation(cos.to(self._dtype), (angles.sin_() * self.sign).to(self._dtype), self.ops)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, D] with PyTorch's operations; a `Rotation` uses the device's fastest operations."""
    return TorchOps().rotate(x, cos, sin)


def frequency_bytes(model: object) -> bytes:
    """Return the frequencies of all rotations of a model.

    Cached keys depend on the frequencies. The frequencies of longrope also depend on `model.context_len`, which may
    differ between two engines with the same checkpoint.
    """
    if not isinstance(model, nn.Module):
        return b""
    rotations = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    return b"".join(rotation.inv_freq.cpu().numpy().tobytes() for rotation in rotations)
