"""Weight matrices in layouts that products read faster, and the one that oneDNN's kernels read.

A plain matrix is rearranged, in part or in whole, by every product that reads it. Rearranging it once makes products
of few rows, the ones of decoding, up to twice as fast in bfloat16 and up to five times in float32; docs/log.md has the
figures.
"""

from typing import Final, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["OneDnnMatrix", "PackedGates", "PackedMatrix", "can_pack", "linear", "pack_for_onednn"]

#: Below so many elements, the 10 µs or so that a product takes to find its kernel cost more than packing saves. Plain
#: float32 products have no such cost; those of the narrow types have it anyway.
_MIN_ELEMENTS: Final = {torch.float32: 3 << 17, torch.bfloat16: 1 << 15, torch.float16: 1 << 15}


class PackedMatrix(Protocol):
    """A weight matrix, [out, in], in a layout of its own."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out], as `torch.nn.functional.linear` does, up to rounding."""
        ...

    def plain(self) -> Tensor:
        """Return the weight as it was, a copy."""
        ...


class PackedGates(PackedMatrix, Protocol):
    """A matrix of gates above what they gate, [2 I, in], in a layout whose products can be activated on the way."""

    def act_and_mul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [T, in] to [T, I], as `LayerOps.act_and_mul` does of the product."""
        ...


class OneDnnMatrix:
    """A weight matrix in the blocked layout that oneDNN's kernels read.

    Args:
        weight: [out, in], of a dtype that `can_pack` names; not kept.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out]."""
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], ""))

    def plain(self) -> Tensor:
        """Return the weight as it was, a copy."""
        return self._packed.to_dense()


def pack_for_onednn(weight: Tensor) -> OneDnnMatrix | None:
    """Return a weight matrix in oneDNN's layout; None where the plain one is as good.

    That is for small matrices, on other devices, and in dtypes that this CPU's kernels do not know.

    Args:
        weight: [out, in]; not kept.
    """
    return OneDnnMatrix(weight) if _gains(weight) else None


def linear(x: Tensor, weight: Tensor, packed: PackedMatrix | None, bias: Tensor | None = None) -> Tensor:
    """Map [..., in] to [..., out] by the packed matrix, or by the plain one where there is none."""
    return F.linear(x, weight, bias) if packed is None else packed(x, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this CPU has kernels that gain from packed weights of a dtype: oneDNN's, on x86."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or dtype not in _MIN_ELEMENTS:
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _gains(weight: Tensor) -> bool:
    """Whether packing has been measured to pay: of large matrices, in dtypes that the CPU has instructions for."""
    if weight.device.type != "cpu" or not can_pack(weight.dtype):
        return False
    return weight.numel() >= _MIN_ELEMENTS[weight.dtype]
