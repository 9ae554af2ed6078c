"""The operations between matrix products on a CPU, each computed in one pass by a compiled kernel."""

import ctypes
import logging
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from graftlm.errors import InvariantError, ProviderUnavailableError
from graftlm.layers.kernel_build import load_library
from graftlm.layers.native_calls import call_native
from graftlm.layers.ops.torch_ops import TorchOps
from graftlm.layers.packing import PackedGates, PackedMatrix
from graftlm.layers.panels import PanelGates, PanelKernels, PanelMatrix

__all__ = ["NATIVE_DTYPES", "NativeOps"]

_logger = logging.getLogger(__name__)

#: The dtypes that the kernels support.
NATIVE_DTYPES: Final = (torch.float32, torch.bfloat16)

_SOURCE = Path(__file__).with_name("layer_ops.cpp")

_ADDRESS, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: Final[dict[str, list[Any]]] = {
    "rms_norm": [_ADDRESS] * 5 + [_SIZE, _SIZE, _FLOAT, _SIZE],
    "head_norm": [_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _FLOAT, _SIZE],
    "rotate": [_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE],
    "silu_and_mul": [_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE],
    "gelu_tanh_and_mul": [_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE],
}
_SUFFIXES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
#: (dtype of the values, dtype of the weight) -> suffix of the names of the norms' functions.
_NORM_SUFFIXES: Final = {
    (torch.float32, torch.float32): "float32",
    (torch.bfloat16, torch.bfloat16): "bfloat16",
    (torch.bfloat16, torch.float32): "bfloat16_by_float32",
}
_ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

#: Minimum number of elements for which a second thread saves more time than waking it costs; docs/log.md has figures.
_PARALLEL_ELEMENTS: Final = 1 << 15


class NativeOps:
    """`LayerOps` with the kernels of layer_ops.cpp; `TorchOps` computes the cases that they do not support.

    For a row of a few thousand elements, the arithmetic takes less than a microsecond, and Python's overhead dominates.
    Checks are therefore few and cheap.

    Args:
        library: the library compiled from layer_ops.cpp.
        panels: the kernels for bfloat16 matrices; None: PyTorch multiplies these matrices.
    """

    def __init__(self, library: ctypes.CDLL, panels: PanelKernels | None = None) -> None:
        self._torch = TorchOps()
        self._kernels = _Kernels(library)
        self._panels = panels

    @classmethod
    def load(cls, compiler: str, cache_dir: Path) -> Self:
        """Compile the kernels if needed, and load them.

        Raises:
            KernelBuildError: the kernels cannot be compiled or loaded.
        """
        library = load_library(_SOURCE, compiler, cache_dir)
        try:
            panels = PanelKernels.load(compiler, cache_dir)
        except ProviderUnavailableError as error:
            _logger.info("matrix products use PyTorch's operations instead of compiled kernels: %s", error)
            panels = None
        return cls(library, panels)

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """Pack a bfloat16 matrix into panels, other matrices into oneDNN's layout if this is faster; see `LayerOps`."""
        if self._panels is not None and PanelMatrix.can_hold(weight):
            return PanelMatrix(weight, self._panels)
        return self._torch.pack(weight)

    def pack_gates(self, weight: Tensor, hidden_act: str) -> PackedGates | None:
        """Pack bfloat16 gates and the rows that they multiply into panels; see `LayerOps`."""
        if self._panels is not None and PanelGates.can_activate(weight, hidden_act):
            return PanelGates(weight, self._panels, hidden_act)
        return None

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalise the sum; see `LayerOps`.

        Raises:
            InvariantError: the shapes are inconsistent.
        """
        num_elements, size = x.numel(), weight.numel()
        kernel = self._kernels.rms_norm.get((x.dtype, weight.dtype))
        if kernel is None or not x.is_contiguous() or not weight.is_contiguous():
            return self._torch.add_rms_norm(x, residual, weight, eps)
        if x.size(-1) != size:
            raise _misfit("weights", weight, x)
        total = x
        residual_at = total_at = None
        if residual is not None:
            if residual.dtype is not x.dtype or not residual.is_contiguous():
                return self._torch.add_rms_norm(x, residual, weight, eps)
            if residual.numel() != num_elements:
                raise _misfit("a residual stream", residual, x)
            total = torch.empty_like(x)
            residual_at, total_at = residual.data_ptr(), total.data_ptr()
        out = torch.empty_like(x)
        call_native(
            kernel, x.data_ptr(), residual_at, weight.data_ptr(), out.data_ptr(), total_at,
            num_elements // size, size, eps, _num_threads(num_elements),
        )  # fmt: skip
        return out, total

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise each head; see `LayerOps`.

        Raises:
            InvariantError: the shapes are inconsistent.
        """
        kernel = self._kernels.head_norm.get((heads.dtype, weight.dtype))
        num_tokens, num_heads, head_dim = heads.shape
        token_stride, head_stride, stride = heads.stride()
        if kernel is None or stride != 1 or not weight.is_contiguous():
            return self._torch.head_norm(heads, weight, eps)
        if weight.shape != (num_heads, head_dim):
            raise _misfit("weights", weight, heads)
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        call_native(
            kernel, heads.data_ptr(), token_stride, head_stride, weight.data_ptr(), out.data_ptr(),
            num_tokens, num_heads, head_dim, eps, _num_threads(heads.numel()),
        )  # fmt: skip
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads by their positions; see `LayerOps`.

        Raises:
            InvariantError: the shapes are inconsistent.
        """
        dtype = heads.dtype
        kernel = self._kernels.rotate.get(dtype)
        num_tokens, num_heads, head_dim = heads.shape
        token_stride, head_stride, stride = heads.stride()
        fits = stride == 1 and cos.is_contiguous() and sin.is_contiguous() and cos.dtype is dtype is sin.dtype
        if kernel is None or not fits:
            return self._torch.rotate(heads, cos, sin)
        if head_dim % 2 or not cos.numel() == sin.numel() == num_tokens * head_dim:
            raise _misfit("cosines", cos, heads)
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        call_native(
            kernel, heads.data_ptr(), token_stride, head_stride, cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
            num_tokens, num_heads, head_dim, _num_threads(heads.numel()),
        )  # fmt: skip
        return out

    def act_and_mul(self, gate_up: Tensor, hidden_act: str) -> Tensor:
        """Activate gates and multiply them with the other half; see `LayerOps`.

        Raises:
            InvariantError: the last dimension is odd.
        """
        kernel = self._kernels.act_and_mul.get((gate_up.dtype, hidden_act))
        if kernel is None or not gate_up.is_contiguous():
            return self._torch.act_and_mul(gate_up, hidden_act)
        num_rows, width = gate_up.shape
        if width % 2:
            raise InvariantError(f"expected as many gates as values that they gate, got {list(gate_up.shape)}")
        out = gate_up.new_empty(num_rows, width // 2)
        call_native(kernel, gate_up.data_ptr(), out.data_ptr(), num_rows, width // 2, _num_threads(gate_up.numel()))
        return out


class _Kernels:
    """The library's functions by dtype."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, suffix: str) -> Any:
            found = getattr(library, f"graftlm_{name}_{suffix}")
            found.argtypes, found.restype = _SIGNATURES[name], None
            return found

        self.rms_norm = {dtypes: function("rms_norm", suffix) for dtypes, suffix in _NORM_SUFFIXES.items()}
        self.head_norm = {dtypes: function("head_norm", suffix) for dtypes, suffix in _NORM_SUFFIXES.items()}
        self.rotate = {dtype: function("rotate", suffix) for dtype, suffix in _SUFFIXES.items()}
        self.act_and_mul = {
            (dtype, hidden_act): function(f"{name}_and_mul", suffix)
            for dtype, suffix in _SUFFIXES.items()
            for hidden_act, name in _ACTIVATIONS.items()
        }


def _num_threads(num_elements: int) -> int:
    return 1 if num_elements < _PARALLEL_ELEMENTS else torch.get_num_threads()


def _misfit(what: str, tensor: Tensor, x: Tensor) -> InvariantError:
    # The kernels do not check their pointers: invalid arguments must be refused here.
    return InvariantError(f"got {what} of {list(tensor.shape)} for values of {list(x.shape)}")
