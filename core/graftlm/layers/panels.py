"""Bfloat16 matrices arranged for decoding on CPUs with AVX512-BF16, and the products with them."""

import ctypes
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from graftlm.errors import InvariantError, ProviderUnavailableError
from graftlm.layers.kernel_build import load_library

__all__ = ["PanelKernels", "PanelMatrix"]

_SOURCE = Path(__file__).with_name("panel_matmul.cpp")
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
#: Multiplications of a product from which on a second thread gains more than waking it costs.
_PARALLEL_PRODUCTS: Final = 1 << 17


class PanelKernels:
    """The functions of panel_matmul.cpp.

    Args:
        library: compiled from it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, arguments: list[Any], result: Any = None) -> Any:
            found = getattr(library, f"graftlm_panels_{name}")
            found.argtypes, found.restype = arguments, result
            return found

        self.supported = function("supported", [], _SIZE)
        self.size = function("size", [_SIZE, _SIZE], _SIZE)
        self.pack = function("pack", [_ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE])
        self.unpack = function("unpack", [_ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE])
        self.multiply = function("multiply", [_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE])

    @classmethod
    def load(cls, compiler: str, cache_dir: Path) -> Self:
        """Compile the kernels if need be, and load them.

        Raises:
            ProviderUnavailableError: they cannot be compiled or loaded, or gain nothing on this CPU.
        """
        if torch.cpu._is_amx_tile_supported():
            raise ProviderUnavailableError("this CPU has matrix units (AMX), which oneDNN's kernels use")
        if not torch.cpu._is_avx512_bf16_supported():
            raise ProviderUnavailableError("this CPU has no AVX512-BF16")
        kernels = cls(load_library(_SOURCE, compiler, cache_dir))
        if not kernels.supported():
            raise ProviderUnavailableError("the C++ compiler does not know this CPU's AVX512-BF16")
        return kernels


class PanelMatrix:
    """A weight matrix in panels, multiplied on as many threads as torch uses.

    Args:
        weight: bfloat16 [out, in], `in` even; not kept.
        kernels: that arrange and multiply it.

    Raises:
        InvariantError: the weight is something else.
    """

    def __init__(self, weight: Tensor, kernels: PanelKernels) -> None:
        if not self.can_hold(weight):
            raise InvariantError(f"panels hold bfloat16 on a CPU, [out, in] with `in` even; got {_described(weight)}")
        self.out_features, self.in_features = weight.shape
        self._kernels = kernels
        plain = weight.detach().contiguous()
        self._panels = torch.empty(kernels.size(*weight.shape), dtype=weight.dtype)
        kernels.pack(plain.data_ptr(), *weight.shape, self._panels.data_ptr(), torch.get_num_threads())

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        """Tell whether a matrix can be arranged in panels."""
        is_matrix = weight.dim() == 2 and weight.device.type == "cpu" and weight.layout is torch.strided
        return is_matrix and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self._panels.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out], both bfloat16; sums are float32, rounded once with the bias.

        Raises:
            InvariantError: `x` or the bias does not fit.
        """
        # The kernel trusts its pointers, so a mistake must stop here.
        if x.shape[-1] != self.in_features or x.dtype is not torch.bfloat16:
            raise InvariantError(f"expected bfloat16 activations of {self.in_features} features, got {_described(x)}")
        if bias is not None and (bias.shape != (self.out_features,) or bias.dtype is not torch.bfloat16):
            raise InvariantError(f"expected a bfloat16 bias of {self.out_features}, got {_described(bias)}")
        rows = x.contiguous()
        num_rows = rows.numel() // self.in_features
        out = x.new_empty((*x.shape[:-1], self.out_features))
        is_small = num_rows * self._panels.numel() < _PARALLEL_PRODUCTS
        self._kernels.multiply(
            rows.data_ptr(), num_rows, self._panels.data_ptr(), self.out_features, self.in_features,
            None if bias is None else bias.contiguous().data_ptr(), out.data_ptr(),
            1 if is_small else torch.get_num_threads(),
        )  # fmt: skip
        return out

    def plain(self) -> Tensor:
        """Return the weight as it was, a copy."""
        weight = self._panels.new_empty(self.out_features, self.in_features)
        num_threads = torch.get_num_threads()
        self._kernels.unpack(self._panels.data_ptr(), *weight.shape, weight.data_ptr(), num_threads)
        return weight


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on a {tensor.device.type}"
