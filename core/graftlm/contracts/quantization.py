"""The contract of a quantization, which converts the weights of linear layers to fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LinearKernel", "LinearLayer", "Quantization", "QuantizationCapabilities", "QuantizationContext"]


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer that may be quantized.

    Attributes:
        name: path of the layer in the model, such as "layers.0.mlp.gate_up".
        projections: names of the layer's projections in the checkpoint, in the order of the layer's output, such as
            ("gate_proj", "up_proj").
        in_features: K, the input size.
        out_features: N, the sum of the output sizes of all projections.
    """

    name: str
    projections: tuple[str, ...]
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class QuantizationContext:
    """The arguments of a quantization's `create`: device of the weights, and dtype of weights and activations."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class QuantizationCapabilities:
    """The features that a quantization supports; core reads them before creation.

    Attributes:
        devices: supported torch device types.
        dtypes: names of the supported activation dtypes; None: all.
    """

    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] | None = None


class LinearKernel(ABC):
    """A quantized linear layer: its weights and their matrix product."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the weights in bytes, including scales and other metadata."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Map inputs, [..., K], to outputs, [..., N], in the dtype of `x`."""

    @abstractmethod
    def decoded(self) -> Tensor:
        """Return the dequantized weights, float32 [N, K], for tests and tools. It is slow and needs much memory."""


class Quantization(ABC):
    """Converts linear layers one by one, after a checkpoint is loaded.

    Invariants, each checked by `graftlm.testing.QuantizationConformance`:
        - A layer for which `obstacle` returns None can be converted.
        - Up to rounding, a kernel computes x W^T + bias for any number of rows; W is the result of `decoded`.
        - The decoded weights are close to the original weight.
        - A converted layer takes less memory than its bfloat16 weight.
        - A kernel stores no reference to the original weight, because the weight may be freed or overwritten later.
        - Conversion is deterministic, and does not change the weight or the bias.
    """

    @abstractmethod
    def obstacle(self, layer: LinearLayer) -> str | None:
        """Return the reason why a layer cannot be converted, such as its sizes; None if it can be converted."""

    @abstractmethod
    def convert(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        """Convert a layer, and return the kernel that computes it.

        Args:
            weight: [N, K], the weight of a layer without an obstacle, on the context's device and in its dtype.
            bias: [N], the layer's bias, or None.
        """
