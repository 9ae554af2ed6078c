"""The quantization, which stores each row of a weight as integers from -127 to 127 and a scale."""

import torch
import torch.nn.functional as F
from graftlm.contracts import LinearKernel, LinearLayer, Quantization
from torch import Tensor

from graftlm_new_plugin.options import RowInt8Options

__all__ = ["RowInt8"]


class RowInt8(Quantization):
    """A quantization of every layer that has enough inputs."""

    def __init__(self, options: RowInt8Options) -> None:
        self._min_in_features = options.min_in_features

    def obstacle(self, layer: LinearLayer) -> str | None:
        """Return why a layer is not quantized, or None if it is quantized."""
        if layer.in_features < self._min_in_features:
            return f"it has {layer.in_features} inputs, fewer than min_in_features, {self._min_in_features}"
        return None

    def convert(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        """Quantize a weight, [N, K], with one scale per row."""
        rows = weight.float()
        scales = rows.abs().amax(dim=1) / 127
        scales = torch.where(scales > 0, scales, 1.0)  # a row of zeros gets scale 1 and codes 0
        codes = (rows / scales[:, None]).round().to(torch.int8)
        return _RowInt8Linear(codes, scales, None if bias is None else bias.float().clone())


class _RowInt8Linear(LinearKernel):
    """A layer that multiplies by the codes, then by the scales. bfloat16 represents every code exactly.

    Args:
        codes: int8 [N, K].
        scales: float32 [N].
        bias: float32 [N], or None.
    """

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._codes = codes
        self._scales = scales
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """Size of codes, scales and bias in bytes."""
        parts = (self._codes, self._scales, self._bias)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the dtype of `x`."""
        out = F.linear(x, self._codes.to(x.dtype)).float() * self._scales
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype)

    def decoded(self) -> Tensor:
        """Return the weights, float32 [N, K]."""
        return self._codes.float() * self._scales[:, None]
