"""A quantized layer that uses the C++ kernel in weight_only.cpp."""

import ctypes
from math import gcd
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlm.contracts import LinearKernel
from graftlm.errors import InvariantError
from graftlm.layers.kernel_build import load_library
from graftlm.layers.native_calls import call_native
from graftlm_quantization.coded_matrix import BLOCK_ROWS, CodedMatrix

__all__ = ["NativeLibrary", "NativeLinear"]

_SOURCE = Path(__file__).with_name("weight_only.cpp")
_FUNCTIONS = {torch.float32: "graftlm_multiply_float32", torch.bfloat16: "graftlm_multiply_bfloat16"}
_TILE_FUNCTIONS = _FUNCTIONS | {torch.bfloat16: "graftlm_multiply_tiles"}
_MAX_CHUNK = 128  # maximum inputs of a chunk, so that widened codes and activations fit into the first-level cache


class _Matrix(ctypes.Structure):
    """The struct `GraftlmMatrix` of coded_matrix.h."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("chunks_per_group", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class NativeLibrary:
    """The compiled kernel's functions, with their argument types set.

    Args:
        library: the library that was compiled from weight_only.cpp.
        use_matrix_units: whether bfloat16 products use matrix units (AMX) if the CPU has any.
    """

    def __init__(self, library: ctypes.CDLL, *, use_matrix_units: bool) -> None:
        library.graftlm_tiles_supported.restype = ctypes.c_int64
        self.uses_matrix_units = use_matrix_units and bool(library.graftlm_tiles_supported())
        names = _TILE_FUNCTIONS if self.uses_matrix_units else _FUNCTIONS
        self._multiply = {dtype: getattr(library, name) for dtype, name in names.items()}
        for function in self._multiply.values():
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
            function.restype = ctypes.c_int32

    @classmethod
    def load(cls, compiler: str, cache_dir: Path, *, use_matrix_units: bool = True) -> Self:
        """Load the kernel, and compile it first if no compiled copy exists.

        Args:
            compiler: path of the C++ compiler, or its name on PATH.
            cache_dir: the directory of compiled kernels.
            use_matrix_units: see the class.

        Raises:
            KernelBuildError: the kernel cannot be compiled or loaded.
        """
        return cls(load_library(_SOURCE, compiler, cache_dir), use_matrix_units=use_matrix_units)

    def multiply(self, matrix: Any, x: Tensor, out: Tensor) -> None:
        """Compute out = x W^T + bias.

        Args:
            matrix: a reference to a `_Matrix`.
            x: [M, K], contiguous.
            out: [M, N], contiguous, in the dtype of x.

        Raises:
            InvariantError: the kernel does not support x's dtype.
            MemoryError: the kernel's scratch memory could not be allocated.
        """
        function = self._multiply.get(x.dtype)
        if function is None:
            raise InvariantError(f"the kernel computes in {' or '.join(map(str, _FUNCTIONS))}, got {x.dtype}")
        if not call_native(function, matrix, x.data_ptr(), x.shape[0], out.data_ptr(), torch.get_num_threads()):
            raise MemoryError(f"not enough memory to multiply {list(x.shape)} activations with quantized weights")


class NativeLinear(LinearKernel):
    """Multiplies inputs by quantized weights. The kernel converts the weights' codes while it reads them.

    It uses the same number of threads as torch.

    Args:
        matrix: [N, K].
        bias: float32 [N], or None.
        library: the compiled kernel.
    """

    def __init__(self, matrix: CodedMatrix, bias: Tensor | None, library: NativeLibrary) -> None:
        self._matrix = matrix
        padding = matrix.num_blocks * BLOCK_ROWS - matrix.out_features
        self._padded_bias = None if bias is None else F.pad(bias, (0, padding))
        self._library = library
        chunk = gcd(matrix.group_size, _MAX_CHUNK)
        self._described = ctypes.byref(
            _Matrix(
                num_rows=matrix.out_features,
                num_inputs=matrix.in_features,
                chunk=chunk,
                chunks_per_group=matrix.group_size // chunk,
                bits=matrix.bits,
                codes=matrix.codes.data_ptr(),
                scales=matrix.scales.data_ptr(),
                bias=None if self._padded_bias is None else self._padded_bias.data_ptr(),
            )
        )

    @property
    def num_bytes(self) -> int:
        """Size of codes and scales in bytes."""
        return self._matrix.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N].

        Raises:
            InvariantError: `x` has another K, or a dtype that the kernel does not compute in.
        """
        matrix = self._matrix
        if x.shape[-1] != matrix.in_features:  # checked here, because the kernel does not check its pointers
            raise InvariantError(f"expected activations of {matrix.in_features} features, got {list(x.shape)}")
        rows = x.reshape(-1, matrix.in_features).contiguous()
        out = torch.empty((rows.shape[0], matrix.out_features), dtype=x.dtype)
        self._library.multiply(self._described, rows, out)
        return out.view(*x.shape[:-1], matrix.out_features)

    def decoded(self) -> Tensor:
        """Return the weights, float32 [N, K]."""
        return self._matrix.decoded(0, self._matrix.num_blocks)
