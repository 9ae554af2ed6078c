"""The contract of a quantization: linear layers that hold their weights in fewer bits than the checkpoint."""

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
        name: its place in the model, such as "layers.0.mlp.gate_up".
        projections: the checkpoint's names of what it computes, in the order of its output: ("gate_proj", "up_proj").
        in_features: K.
        out_features: N, of all projections together.
    """

    name: str
    projections: tuple[str, ...]
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class QuantizationContext:
    """What a quantization is created with: where weights lie, and the dtype of weights and activations."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class QuantizationCapabilities:
    """What core may ask of a quantization before it is created.

    Attributes:
        devices: torch device types it runs on.
        dtypes: names of the activation dtypes it computes; None for all.
    """

    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] | None = None


class LinearKernel(ABC):
    """A quantized linear layer: its weights and how they are multiplied."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the weights, with everything that belongs to them."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the dtype of `x`."""

    @abstractmethod
    def decoded(self) -> Tensor:
        """Return the weights it multiplies with, float32 [N, K]. For tests and tools; takes its time and memory."""


class Quantization(ABC):
    """Converts linear layers, one after the other, when a checkpoint has been loaded.

    Invariants, each checked by `graftlm.testing.QuantizationConformance`:
        - A layer without an obstacle can be converted.
        - A kernel computes x W^T + bias with W its decoded weights, up to rounding, for any number of rows.
        - Decoded weights are close to the weight that was converted.
        - A converted layer takes less memory than its bfloat16 weight.
        - A kernel keeps nothing of the weight it was made from: that can be freed, or be overwritten.
        - Conversion changes neither weight nor bias, and gives the same kernel each time.
    """

    @abstractmethod
    def obstacle(self, layer: LinearLayer) -> str | None:
        """Return why a layer stays as it is (its sizes, what it is for), or None if it can be converted."""

    @abstractmethod
    def convert(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        """Return what computes a layer from now on.

        Args:
            weight: [N, K] on the context's device and in its dtype, of a layer without an obstacle.
            bias: [N], or None.
        """
