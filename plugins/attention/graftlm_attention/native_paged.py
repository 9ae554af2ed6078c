"""Paged attention with the C++ kernel in paged_attention.cpp, which reads the pages in place."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch
from graftlm.errors import InvariantError
from graftlm.layers.kernel_build import load_library
from graftlm.layers.native_calls import call_native
from graftlm_attention.shared_prefixes import find_shared_prefixes

__all__ = ["NativePagedAttention", "load_kernel", "native_obstacle"]

_SOURCE = Path(__file__).with_name("paged_attention.cpp")
#: (dtype of q, k and v; dtype of the cache) -> name of the function
_FUNCTIONS = {
    (torch.float32, torch.float32): "graftlm_attend_float32",
    (torch.float32, torch.int8): "graftlm_attend_float32_int8",
    (torch.bfloat16, torch.bfloat16): "graftlm_attend_bfloat16",
    (torch.bfloat16, torch.int8): "graftlm_attend_bfloat16_int8",
}
_LANES = 16  # length of the kernel's vectors, in elements
_NO_WINDOW = 2**62


class _Step(ctypes.Structure):
    """The struct `GraftlmStep` of paged_step.h."""

    _fields_ = (
        ("num_requests", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("table_columns", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("out_slots", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("use_matrix_units", ctypes.c_int32),
        ("num_groups", ctypes.c_int64),
        ("group_starts", ctypes.c_void_p),
        ("members", ctypes.c_void_p),
        ("shared_lens", ctypes.c_void_p),
    )


class _Layer(ctypes.Structure):
    """The struct `GraftlmLayer` of paged_step.h."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("has_soft_cap", ctypes.c_int32),
        ("soft_cap", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    )


class _Tensor(ctypes.Structure):
    """The struct `GraftlmTensor` of paged_step.h."""

    _fields_ = (("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


def native_obstacle(context: AttentionContext) -> str | None:
    """Return why the kernel does not support these layers; None if it does."""
    if context.device.type != "cpu":
        return f"the kernel runs on the CPU, but the engine runs on {context.device.type!r}"
    if (context.dtype, context.dtype) not in _FUNCTIONS:
        return f"the kernel computes in torch.float32 or torch.bfloat16, but the engine computes in {context.dtype}"
    kv_dtype = _kv_dtype(context)
    if (context.dtype, kv_dtype) not in _FUNCTIONS:
        return f"the kernel reads a cache of {context.dtype} or torch.int8, got {kv_dtype}"
    dims = {dim for layer in context.layers for dim in (layer.head_dim, layer.value_dim)}
    odd = sorted(dim for dim in dims if dim % _LANES)
    return f"the kernel needs head_dim to be a multiple of {_LANES}, got {odd}" if odd else None


def load_kernel(compiler: str, cache_dir: Path) -> ctypes.CDLL:
    """Load the kernel; compile it first if there is no compiled copy. It uses the OpenMP runtime that torch has loaded.

    Args:
        compiler: path of the C++ compiler, or its name on PATH.
        cache_dir: folder of compiled kernels.

    Raises:
        KernelBuildError: the kernel cannot be compiled or loaded.
    """
    return load_library(_SOURCE, compiler, cache_dir)


@dataclass(frozen=True, slots=True)
class _PreparedStep:
    """The prepared batch: its number of tokens, and the tensors whose memory `_Step` points to."""

    num_tokens: int
    keep: tuple[object, ...]


class NativePagedAttention(AttentionBackend):
    """Attention by a compiled CPU kernel, in float32 or bfloat16; the cache has the same dtype or int8.

    `head_dim` is a multiple of 16.

    One call per layer writes keys and values and computes attention, with torch's number of threads. The call
    releases the interpreter lock.

    Args:
        context: layers and cache, for which `native_obstacle` must return None.
        kernel: the library that `load_kernel` returns.
        matrix_units: whether bfloat16 queries are multiplied on the CPU's matrix units (AMX), if it has any.
    """

    kernel = "native"

    def __init__(self, context: AttentionContext, kernel: ctypes.CDLL, *, matrix_units: bool = True) -> None:
        self._page_size = context.page_size
        self._dtype = context.dtype
        self._attend = getattr(kernel, _FUNCTIONS[context.dtype, _kv_dtype(context)])
        self._attend.argtypes = [ctypes.c_void_p] * 7
        self._attend.restype = None
        self._layers = [_describe(layer, context) for layer in context.layers]
        self._kv = context.kv  # its tensors must live as long as the pointers in _layers
        self._step = _Step(page_size=self._page_size, use_matrix_units=matrix_units)
        self._step_ref = ctypes.byref(self._step)
        self._query_lens = np.empty(0, dtype=np.int32)
        self._query_lens_tensor = torch.from_numpy(self._query_lens)
        self._prepared: _PreparedStep | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        """Write the batch's sizes and pointers to `_Step`."""
        out_slots, seq_lens, page_table = (
            batch.out_slots.contiguous(), batch.seq_lens.contiguous(), batch.page_table.contiguous()
        )  # fmt: skip
        step = self._step  # changed in place, because recorded steps repeat the call with the same address
        num_tokens = batch.num_tokens
        step.num_requests = batch.num_requests
        step.num_tokens = num_tokens
        step.table_columns = page_table.shape[1]
        step.num_threads = torch.get_num_threads()
        step.out_slots = out_slots.data_ptr()
        step.query_lens = self._query_lens_of(batch).data_ptr()
        step.seq_lens = seq_lens.data_ptr()
        step.page_table = page_table.data_ptr()
        shared = find_shared_prefixes(batch.page_table_cpu, batch.seq_lens_cpu, batch.num_decodes, self._page_size)
        step.num_groups = 0 if shared is None else len(shared.lens)
        groups: list[Tensor] = []
        if shared is not None:
            groups = [torch.from_numpy(array) for array in shared]
            step.group_starts, step.members, step.shared_lens = [tensor.data_ptr() for tensor in groups]
        self._prepared = _PreparedStep(num_tokens, (out_slots, seq_lens, page_table, *groups))

    def _query_lens_of(self, batch: ForwardBatch) -> Tensor:
        """Return a batch's query lengths as a tensor, whose address is read ten times as fast as a numpy array's."""
        if batch.query_lens_cpu is not self._query_lens:  # the array is the same object while the same requests decode
            self._query_lens = batch.query_lens_cpu
            self._query_lens_tensor = torch.from_numpy(np.ascontiguousarray(self._query_lens, dtype=np.int32))
        return self._query_lens_tensor

    @property
    def repeats_calls(self) -> bool:
        """Always true: the kernel reads the batch from `_Step`, so a recorded call can be repeated."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write keys and values, then compute attention; the contract defines the shapes.

        Raises:
            InvariantError: called before `prepare`, or with tensors that do not fit the batch and the context's dtype.
        """
        prepared = self._prepared
        if prepared is None:
            raise InvariantError("NativePagedAttention.forward was called before prepare(batch)")
        shape = (prepared.num_tokens, layer.num_heads, layer.head_dim)
        kv_shape = (prepared.num_tokens, layer.num_kv_heads, layer.head_dim)
        value_shape = (prepared.num_tokens, layer.num_kv_heads, layer.value_dim)
        # The kernel does not check its pointers, so shapes and dtypes are checked here.
        if q.shape != shape or k.shape != kv_shape or v.shape != value_shape:
            raise InvariantError(
                f"layer {layer.layer_id} expects q {shape}, k {kv_shape} and v {value_shape}, "
                f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        if not q.dtype == k.dtype == v.dtype == self._dtype:
            raise InvariantError(f"expected {self._dtype} tensors, got {q.dtype}, {k.dtype}, {v.dtype}")
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        out = torch.empty((prepared.num_tokens, layer.num_heads * layer.value_dim), dtype=self._dtype)
        call_native(
            self._attend,
            self._step_ref,
            self._layers[layer.layer_id],
            _point(q),
            _point(k),
            _point(v),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        return out


def _kv_dtype(context: AttentionContext) -> torch.dtype:
    return context.kv.keys(context.layers[0].layer_id).dtype if context.layers else context.dtype


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _describe(layer: AttentionLayer, context: AttentionContext) -> Any:
    return ctypes.byref(
        _Layer(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            window=_NO_WINDOW if layer.sliding_window is None else layer.sliding_window,
            has_soft_cap=layer.soft_cap is not None,
            soft_cap=0.0 if layer.soft_cap is None else layer.soft_cap,
            scale=layer.scale,
            keys=context.kv.keys(layer.layer_id).data_ptr(),
            values=context.kv.values(layer.layer_id).data_ptr(),
            key_scales=_address(context.kv.key_scales(layer.layer_id)),
            value_scales=_address(context.kv.value_scales(layer.layer_id)),
        )
    )


def _point(tensor: Tensor) -> Any:
    token_stride, head_stride, _ = tensor.stride()
    return ctypes.byref(_Tensor(tensor.data_ptr(), token_stride, head_stride))
