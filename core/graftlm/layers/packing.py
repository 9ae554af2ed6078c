"""Packs weight matrices, by default in oneDNN's layout.

Every product with a plain matrix rearranges the matrix, in part or in whole. If the matrix is packed once, products
with few rows, as in decode, are up to twice as fast in bfloat16 and up to five times as fast in float32; docs/log.md
has the figures.
"""

from typing import Final, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["OneDnnMatrix", "PackedGates", "PackedMatrix", "can_pack", "linear", "pack_for_onednn"]

#: Minimum number of elements of a matrix that is packed. For a smaller matrix, the 10 µs that a packed product needs to
#: find its kernel cost more than packing saves. Plain products have this cost too in the narrow types, but not in
#: float32.
_MIN_ELEMENTS: Final = {torch.float32: 3 << 17, torch.bfloat16: 1 << 15, torch.float16: 1 << 15}


class PackedMatrix(Protocol):
    """A weight matrix, [out, in], in a packed layout."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out] like `torch.nn.functional.linear`, up to rounding."""
        ...

    def plain(self) -> Tensor:
        """Return a copy of the plain weight."""
        ...


class PackedGates(PackedMatrix, Protocol):
    """Gates and then the rows that they multiply, [2 I, in], packed so that products can be activated in registers."""

    def act_and_mul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [T, in] to [T, I]: the product, then `LayerOps.act_and_mul`."""
        ...


class OneDnnMatrix:
    """A weight matrix in the blocked layout that oneDNN's kernels read.

    Args:
        weight: [out, in], of a dtype for which `can_pack` is True; no reference is kept.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out]."""
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], ""))

    def plain(self) -> Tensor:
        """Return a copy of the plain weight."""
        return self._packed.to_dense()


def pack_for_onednn(weight: Tensor) -> OneDnnMatrix | None:
    """Return a weight matrix in oneDNN's layout, or None if the plain layout is as fast.

    The plain layout is as fast for small matrices, on other devices, and in dtypes without kernels on this CPU.

    Args:
        weight: [out, in]; no reference is kept.
    """
    return OneDnnMatrix(weight) if _gains(weight) else None


def linear(x: Tensor, weight: Tensor, packed: PackedMatrix | None, bias: Tensor | None = None) -> Tensor:
    """Map [..., in] to [..., out] with the packed matrix, or with the plain one if `packed` is None."""
    return F.linear(x, weight, bias) if packed is None else packed(x, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has kernels for packed weights of a dtype on this CPU, which must be x86."""
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
    """Return whether packing was measured to be faster: large matrices, in dtypes that the CPU supports natively."""
    if weight.device.type != "cpu" or not can_pack(weight.dtype):
        return False
    return weight.numel() >= _MIN_ELEMENTS[weight.dtype]
