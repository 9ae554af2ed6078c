"""The operations with a recurrent state on a CPU, each in one call of a compiled kernel."""

import ctypes
from pathlib import Path
from typing import Any, Final, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import StateBatch
from graftlm.layers.kernel_build import load_library
from graftlm.layers.native_calls import call_native
from graftlm.layers.state_ops.torch_state_ops import TorchStateOps

__all__ = ["NativeStateOps"]

_SOURCE = Path(__file__).with_name("state_ops.cpp")

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
#: starts, lens, sources, targets and number of segments
_SEGMENTS: Final = [_ADDRESS] * 4 + [_SIZE]
_SUFFIXES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

#: Largest kernel of the compiled convolution; `kMaxKernel` in the source.
_MAX_KERNEL: Final = 16
#: Minimum number of products for which a second thread saves more time than waking it costs.
_PARALLEL_PRODUCTS: Final = 1 << 16


class NativeStateOps:
    """`StateOps` with the kernels of state_ops.cpp; `TorchStateOps` computes the cases that they do not support.

    Args:
        library: the library compiled from state_ops.cpp.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, arguments: list[Any]) -> Any:
            found = getattr(library, f"graftlm_{name}")
            found.argtypes, found.restype = arguments, None
            return found

        conv = [_ADDRESS, _SIZE, *[_ADDRESS] * 4, *_SEGMENTS, *[_SIZE] * 4]
        self._conv = {dtype: function(f"causal_conv_{suffix}", conv) for dtype, suffix in _SUFFIXES.items()}
        self._ssd = function("ssd_scan", [*[_ADDRESS] * 4, _SIZE, *[_ADDRESS] * 2, *_SEGMENTS, *[_SIZE] * 5])
        self._delta = function("gated_delta_rule", [*[_ADDRESS] * 8, *_SEGMENTS, *[_SIZE] * 5])
        self._torch = TorchStateOps()

    @classmethod
    def load(cls, compiler: str, cache_dir: Path) -> Self:
        """Compile the kernels if needed, and load them.

        Raises:
            KernelBuildError: the kernels cannot be compiled or loaded.
        """
        return cls(load_library(_SOURCE, compiler, cache_dir))

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        """Convolve each channel with its latest K inputs; see `StateOps`."""
        kernel, kernel_size = self._conv.get(x.dtype), len(weight)
        same_dtype = x.dtype is weight.dtype is state.dtype
        if kernel is None or kernel_size > _MAX_KERNEL or x.stride(1) != 1 or not same_dtype:
            return self._torch.causal_conv(x, weight, bias, state, batch, silu=silu)
        out = x.new_empty(x.shape)
        call_native(
            kernel, x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(),
            out.data_ptr(), state.data_ptr(), *_segments(batch),
            x.shape[1], kernel_size, int(silu), _num_threads(x.numel() * kernel_size),
        )  # fmt: skip
        return out

    def ssd_scan(self, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        """Compute the scan of Mamba 2; see `StateOps`."""
        num_heads, size = x.shape[1:]
        num_groups, width = b.shape[1:]
        x, log_decay = x.contiguous(), log_decay.contiguous()
        if not (b.stride() == c.stride() and b.stride()[1:] == (width, 1)):
            b, c = b.contiguous(), c.contiguous()
        out = torch.empty_like(x)
        call_native(
            self._ssd, x.data_ptr(), log_decay.data_ptr(), b.data_ptr(), c.data_ptr(), b.stride(0),
            out.data_ptr(), state.data_ptr(), *_segments(batch),
            num_heads, num_groups, size, width, _num_threads(x.numel() * width),
        )  # fmt: skip
        return out

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
    ) -> Tensor:
        """Compute the gated delta rule; see `StateOps`."""
        num_heads, value_size = v.shape[1:]
        num_groups, key_size = k.shape[1:]
        q, k, v, log_decay, beta = (tensor.contiguous() for tensor in (q, k, v, log_decay, beta))
        out, scratch = torch.empty_like(v), v.new_empty(num_heads, 2 * value_size)
        call_native(
            self._delta, q.data_ptr(), k.data_ptr(), v.data_ptr(), log_decay.data_ptr(), beta.data_ptr(),
            out.data_ptr(), state.data_ptr(), scratch.data_ptr(), *_segments(batch),
            num_heads, num_groups, key_size, value_size, _num_threads(v.numel() * key_size),
        )  # fmt: skip
        return out


def _segments(batch: StateBatch) -> tuple[int, int, int, int, int]:
    """Return the addresses of the segments' columns, and their number."""
    segments = batch.segments
    starts, lens, sources, targets = map(_address, (segments.starts, segments.lens, segments.sources, segments.targets))
    return starts, lens, sources, targets, len(segments.starts)


def _address(column: NDArray[Any]) -> int:
    address: int = column.ctypes.data
    return address


def _num_threads(num_products: int) -> int:
    return torch.get_num_threads() if num_products >= _PARALLEL_PRODUCTS else 1
