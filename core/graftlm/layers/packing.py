"""Weight matrices in the blocked layout that oneDNN's kernels read, on the CPUs that gain from it.

A plain matrix is rearranged, in part or in whole, by every product that reads it. Rearranging it once makes products
of few rows, the ones of decoding, up to twice as fast in bfloat16 and up to five times in float32; docs/log.md has the
figures.
"""

from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["can_pack", "linear", "pack"]

#: Below so many elements, the 10 µs or so that a product takes to find its kernel cost more than packing saves. Plain
#: float32 products have no such cost; those of the narrow types have it anyway.
_MIN_ELEMENTS: Final = {torch.float32: 3 << 17, torch.bfloat16: 1 << 15, torch.float16: 1 << 15}


def pack(weight: Tensor) -> nn.Parameter:
    """Return a weight matrix in the layout that `linear` reads fastest.

    Args:
        weight: [out, in], any layout.

    Returns: [out, in], opaque to everything but `linear` if its layout is `torch._mkldnn`; `weight` itself where the
        plain layout is as good: for small matrices, on other devices, in dtypes that this CPU's kernels do not know.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach()) if _gains(weight) else weight
    return nn.Parameter(packed, requires_grad=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map [..., in] to [..., out] by a weight of either layout, as `torch.nn.functional.linear` does."""
    if weight.is_mkldnn:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))
    return F.linear(x, weight, bias)


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
    if weight.device.type != "cpu" or weight.is_mkldnn or not can_pack(weight.dtype):
        return False
    return weight.numel() >= _MIN_ELEMENTS[weight.dtype]
