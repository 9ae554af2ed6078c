"""The quantization `fp8`: weights and activations in float8_e4m3fn, multiplied by a GPU's tensor cores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from graftlm.contracts import LinearKernel, LinearLayer, Quantization
from graftlm_quantization.options import Fp8Options

__all__ = ["Fp8", "Fp8Linear", "Fp8Rows", "multiply_by_gpu", "multiply_in_float32"]

_DTYPE = torch.float8_e4m3fn
_LARGEST = 448.0
#: The GPU's product needs matrix sizes that are multiples of this.
_MULTIPLE = 16
#: The smallest scale, which is used for rows of zeros.
_MIN_SCALE = float(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix whose row i is scales[i] * codes[i]. The largest magnitude of a row has the largest code, 448.

    Attributes:
        codes: float8_e4m3fn [n, K], contiguous.
        scales: float32 [n, 1].
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def encode(cls, rows: Tensor) -> "Fp8Rows":
        """Quantize a matrix, [n, K] of any floating dtype. NaN stays NaN."""
        numbers = rows.float()
        scales = (numbers.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp_(min=_MIN_SCALE)
        return cls((numbers / scales).clamp_(-_LARGEST, _LARGEST).to(_DTYPE), scales)

    def decoded(self) -> Tensor:
        """Return the matrix, float32 [n, K]."""
        return self.codes.float() * self.scales


#: Function that multiplies activations [M, K] with weights [N, K]. Returns [M, N] in bfloat16.
Multiply: TypeAlias = Callable[[Fp8Rows, Fp8Rows], Tensor]


def multiply_by_gpu(x: Fp8Rows, weight: Fp8Rows) -> Tensor:
    """Multiply on a CUDA device of compute capability 8.9 or later; K and N are multiples of 16."""
    product: Tensor = torch._scaled_mm(
        x.codes, weight.codes.t(), scale_a=x.scales, scale_b=weight.scales.t(), out_dtype=torch.bfloat16
    )
    return product


def multiply_in_float32(x: Fp8Rows, weight: Fp8Rows) -> Tensor:
    """Multiply slowly on any device, as a reference for the GPU's product."""
    return (x.decoded() @ weight.decoded().t()).bfloat16()


class Fp8Linear(LinearKernel):
    """Quantizes activations with one scale per row, and multiplies them with weights that have one scale per output.

    Args:
        weight: [N, K].
        bias: [N], or None.
        multiply: function that computes the product.
    """

    def __init__(self, weight: Fp8Rows, bias: Tensor | None, multiply: Multiply) -> None:
        self._weight = weight
        self._bias = bias
        self._multiply = multiply

    @property
    def num_bytes(self) -> int:
        """Size of codes and scales in bytes."""
        return self._weight.codes.nbytes + self._weight.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        num_outputs, num_inputs = self._weight.codes.shape
        rows = x.reshape(-1, num_inputs)
        if not len(rows):
            return x.new_empty(*x.shape[:-1], num_outputs)
        out = self._multiply(Fp8Rows.encode(rows), self._weight).to(x.dtype)
        if self._bias is not None:
            out += self._bias
        return out.view(*x.shape[:-1], num_outputs)

    def decoded(self) -> Tensor:
        """Return the weights, float32 [N, K]."""
        return self._weight.decoded()


class Fp8(Quantization):
    """Quantizes weights with one scale per output, and activations with one scale per token, computed in each step.

    Args:
        options: options that set which layers are not quantized.
        multiply: function that computes the product of every layer.
    """

    def __init__(self, options: Fp8Options, multiply: Multiply) -> None:
        self._keep = frozenset(options.keep)
        self._multiply = multiply

    def obstacle(self, layer: LinearLayer) -> str | None:
        """Return why a layer is not quantized (option `keep`, or its sizes), or None if it is."""
        kept = [name for name in layer.projections if name in self._keep]
        if kept:
            return f"option keep names {kept[0]}"
        if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
            sizes = f"{layer.out_features} x {layer.in_features}"
            return f"its sizes, {sizes}, are not multiples of {_MULTIPLE}"
        return None

    def convert(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        """Quantize a weight, [N, K]; the bias is [N] or None."""
        own_bias = None if bias is None else bias.detach().clone()
        return Fp8Linear(Fp8Rows.encode(weight.detach()), own_bias, self._multiply)
