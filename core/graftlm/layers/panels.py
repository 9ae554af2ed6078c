"""Packs bfloat16 matrices for CPUs with AVX512-BF16 or AMX, and multiplies them."""

import ctypes
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from graftlm.errors import InvariantError, ProviderUnavailableError
from graftlm.layers.kernel_build import load_library
from graftlm.layers.native_calls import call_native

__all__ = ["PanelGates", "PanelKernels", "PanelMatrix"]

_VECTORS = Path(__file__).with_name("panel_matmul.cpp")
_TILES = Path(__file__).with_name("tile_matmul.cpp")
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
#: Minimum number of multiplications for which a second thread saves more time than waking it costs.
_PARALLEL_PRODUCTS: Final = 1 << 17
#: Name of an activation in config.json -> its number in the kernels; 0 is no activation.
_ACTIVATIONS: Final = {"silu": 1, "swish": 1, "gelu_pytorch_tanh": 2}
#: The number of gates, I, must be a multiple of this number, so that gates fill whole vectors.
_GATE_ROWS: Final = 16


class PanelKernels:
    """The functions of panel_matmul.cpp, or the same functions of tile_matmul.cpp.

    Args:
        library: the library compiled from one of the two files.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, arguments: list[Any], result: Any = None) -> Any:
            found = getattr(library, f"graftlm_panels_{name}")
            found.argtypes, found.restype = arguments, result
            return found

        self.supported = function("supported", [], _SIZE)
        self.size = function("size", [_SIZE, _SIZE], _SIZE)
        self.pack = function("pack", [_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _SIZE])
        self.unpack = function("unpack", [_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _SIZE])
        arguments = [_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE]
        self.multiply = function("multiply", arguments)

    @classmethod
    def load(cls, compiler: str, cache_dir: Path, *, use_matrix_units: bool = True) -> Self:
        """Compile the kernels for this CPU if needed, and load them.

        Args:
            compiler, cache_dir: see `load_library`.
            use_matrix_units: whether to choose the AMX kernels on a CPU with AMX.

        Raises:
            ProviderUnavailableError: the kernels cannot be compiled or loaded, or there are none for this CPU.
        """
        if not torch.cpu._is_avx512_bf16_supported():
            raise ProviderUnavailableError("this CPU has no AVX512-BF16")
        sources = [_TILES, _VECTORS] if use_matrix_units and torch.cpu._is_amx_tile_supported() else [_VECTORS]
        for source in sources:
            kernels = cls(load_library(source, compiler, cache_dir))
            if kernels.supported():
                return kernels
        raise ProviderUnavailableError(
            "the kernels are compiled without AVX512-BF16: the compiler does not know it, or model.kernels excludes it"
        )


class PanelMatrix:
    """A weight matrix in panels; products use torch's number of threads.

    Args:
        weight: bfloat16 [out, in], `in` even; no reference is kept.
        kernels: kernels that pack and multiply the matrix.

    Raises:
        InvariantError: the weight has another dtype, shape or device.
    """

    _has_gates = False

    def __init__(self, weight: Tensor, kernels: PanelKernels) -> None:
        if not self.can_hold(weight):
            raise InvariantError(f"panels hold bfloat16 on a CPU, [out, in] with `in` even; got {_described(weight)}")
        self.out_features, self.in_features = weight.shape
        self._kernels = kernels
        plain = weight.detach().contiguous()
        self._panels = torch.empty(kernels.size(*weight.shape), dtype=weight.dtype)
        self._address = self._panels.data_ptr()
        self._parallel_rows = _PARALLEL_PRODUCTS / max(self._panels.numel(), 1)
        num_threads = torch.get_num_threads()
        kernels.pack(plain.data_ptr(), *weight.shape, self._has_gates, self._address, num_threads)

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        """Return whether a matrix can be packed into panels."""
        is_matrix = weight.dim() == 2 and weight.device.type == "cpu" and weight.layout is torch.strided
        return is_matrix and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes."""
        return self._panels.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out], both bfloat16; sums are float32, rounded once with the bias.

        Raises:
            InvariantError: the shape or dtype of `x` or the bias is wrong.
        """
        return self._multiply(x, bias, self.out_features, activation=0)

    def plain(self) -> Tensor:
        """Return a copy of the plain weight."""
        weight = self._panels.new_empty(self.out_features, self.in_features)
        num_threads = torch.get_num_threads()
        self._kernels.unpack(self._address, *weight.shape, self._has_gates, weight.data_ptr(), num_threads)
        return weight

    def _multiply(self, x: Tensor, bias: Tensor | None, width: int, activation: int) -> Tensor:
        # The kernel does not check its pointers: invalid arguments must be refused here.
        *batch, num_inputs = x.shape
        if num_inputs != self.in_features or x.dtype is not torch.bfloat16:
            raise InvariantError(f"expected bfloat16 activations of {self.in_features} features, got {_described(x)}")
        if bias is not None and (bias.shape != (self.out_features,) or bias.dtype is not torch.bfloat16):
            raise InvariantError(f"expected a bfloat16 bias of {self.out_features}, got {_described(bias)}")
        rows, added = x.contiguous(), None if bias is None else bias.contiguous()  # alive until the call returns
        num_rows = rows.numel() // num_inputs
        out = x.new_empty((*batch, width))
        call_native(
            self._kernels.multiply,
            rows.data_ptr(), num_rows, self._address, self.out_features, num_inputs, self._has_gates, activation,
            None if added is None else added.data_ptr(), out.data_ptr(),
            1 if num_rows < self._parallel_rows else torch.get_num_threads(),
        )  # fmt: skip
        return out


class PanelGates(PanelMatrix):
    """Gates and the rows that they multiply, packed next to each other, so that products are activated in registers.

    Args:
        weight: bfloat16 [2 I, in], `in` even and I a multiple of 16; no reference is kept.
        kernels: kernels that pack and multiply the matrix.
        hidden_act: name of the activation in config.json.

    Raises:
        InvariantError: the weight has another dtype, shape or device, or there are no kernels for the activation.
    """

    _has_gates = True

    def __init__(self, weight: Tensor, kernels: PanelKernels, hidden_act: str) -> None:
        if not self.can_activate(weight, hidden_act):
            raise InvariantError(f"there are no kernels for {hidden_act} gates in {_described(weight)}")
        super().__init__(weight, kernels)
        self._activation = _ACTIVATIONS[hidden_act]

    @staticmethod
    def can_activate(weight: Tensor, hidden_act: str) -> bool:
        """Return whether there are kernels for a matrix and an activation."""
        is_whole = PanelMatrix.can_hold(weight) and weight.shape[0] % (2 * _GATE_ROWS) == 0
        return is_whole and hidden_act in _ACTIVATIONS

    def act_and_mul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., I]: the product, then `LayerOps.act_and_mul`.

        Raises:
            InvariantError: the shape or dtype of `x` or the bias is wrong.
        """
        return self._multiply(x, bias, self.out_features // 2, self._activation)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on a {tensor.device.type}"
