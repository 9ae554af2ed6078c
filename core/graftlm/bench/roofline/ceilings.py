"""The machine's two ceilings: the bandwidth of reading memory, and the speed of matrix products."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from graftlm.bench.roofline.clock import Clock
from graftlm.bench.roofline.cost import Cost
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import choose_ops
from graftlm.layers.packing import linear

__all__ = ["Bound", "CeilingProbe", "Ceilings", "Effort"]

Bound = Literal["memory", "matrix"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Effort:
    """The sizes and durations of the measurements.

    Attributes:
        read_bytes: number of bytes that one sample reads. This must be several times the size of the CPU caches;
            otherwise the speed of the caches is measured.
        matrix_shapes: (M, K, N) of the matrix products; the fastest product gives the ceiling.
        rounds: number of rounds. In each round, the ceilings and every case are measured once.
        turn_s: time limit for a case in a round, in seconds. After this time no step starts; at least one step runs.
    """

    read_bytes: int = _GIB
    matrix_shapes: tuple[tuple[int, int, int], ...] = ((512, 1024, 4096), (2048, 1024, 4096), (2048, 2048, 2048))
    rounds: int = 7
    turn_s: float = 0.2

    @classmethod
    def for_device(cls, device: torch.device, rounds: int) -> "Effort":
        """Return the sizes for a device. A GPU is fully used only with larger sizes."""
        if device.type == "cpu":
            return cls(rounds=rounds)
        shapes = ((4096, 4096, 4096), (8192, 4096, 8192), (8192, 8192, 8192))
        return cls(4 * _GIB, shapes, rounds)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured maximum speeds of the machine.

    Attributes:
        read_bytes_per_s: bandwidth of reading memory.
        read_by: name of the fastest read operation.
        read_bytes: number of bytes that were read for one sample.
        matrix_flops_per_s: speed of a matrix product in the model's dtype.
        matrix_shape: (M, K, N) of the fastest product.
        dtype: dtype of the product.
    """

    read_bytes_per_s: float
    read_by: str
    read_bytes: int
    matrix_flops_per_s: float
    matrix_shape: tuple[int, int, int]
    dtype: str

    def seconds(self, cost: Cost) -> dict[Bound, float]:
        """Return ceiling -> time of a cost at this ceiling, in seconds."""
        return {"memory": cost.num_bytes / self.read_bytes_per_s, "matrix": cost.flops / self.matrix_flops_per_s}


class CeilingProbe:
    """A measurement of the ceilings that takes single samples, so that samples and steps can alternate.

    Effects: allocates `effort.read_bytes` bytes and the matrices; the memory is freed when the object is deleted.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, clock: Clock, effort: Effort) -> None:
        self._clock = clock
        self._dtype = dtype
        self._read_bytes = effort.read_bytes // _ROW_BYTES * _ROW_BYTES
        self._reads = _reads(self._read_bytes, device)
        self._products = {shape: _product(shape, device, dtype) for shape in effort.matrix_shapes}
        self._read_s: dict[str, list[float]] = {name: [] for name in self._reads}
        self._product_s: dict[tuple[int, int, int], list[float]] = {shape: [] for shape in self._products}
        for run in (*self._reads.values(), *self._products.values()):
            run()  # the first call allocates memory and loads kernels

    def sample(self) -> None:
        """Time each read operation and each matrix product once."""
        for name, read in self._reads.items():
            self._read_s[name].append(self._timed(read))
        for shape, product in self._products.items():
            self._product_s[shape].append(self._timed(product))

    def ceilings(self) -> Ceilings:
        """Return the ceilings, which are the best medians over the samples. Needs at least one sample."""
        read_by = min(self._read_s, key=lambda name: median(self._read_s[name]))
        rates = {shape: _flops(shape) / median(times) for shape, times in self._product_s.items()}
        shape = max(rates, key=lambda shape: rates[shape])
        return Ceilings(
            read_bytes_per_s=self._read_bytes / median(self._read_s[read_by]),
            read_by=read_by,
            read_bytes=self._read_bytes,
            matrix_flops_per_s=rates[shape],
            matrix_shape=shape,
            dtype=str(self._dtype).removeprefix("torch."),
        )

    def _timed(self, run: Callable[[], object]) -> float:
        start = self._clock.mark()
        run()
        end = self._clock.mark()
        self._clock.sync()
        return self._clock.seconds(start, end)


#: Number of elements in a row of the float32 matrix that `mv` reads.
_ROW_LEN = 1 << 12
_ROW_BYTES = 4 * _ROW_LEN


def _reads(num_bytes: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return name -> operation that reads `num_bytes` once. The fastest operation depends on the machine."""
    data = torch.ones(num_bytes // _ROW_BYTES, _ROW_LEN, device=device)
    flat, vector = data.view(-1), torch.ones(_ROW_LEN, device=device)
    return {
        "sum": lambda: flat.sum(),
        "dot": lambda: torch.dot(flat, flat),
        "matrix-vector product": lambda: torch.mv(data, vector),
    }


def _product(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a matrix product as the model's layers compute it, with packed weights if they are faster."""
    num_rows, in_features, out_features = shape
    x = torch.randn(num_rows, in_features, device=device).to(dtype)
    weight = torch.randn(out_features, in_features, device=device).to(dtype)
    packed = choose_ops(device, dtype, user_cache_dir(os.environ)).pack(weight)
    return lambda: linear(x, weight, packed)


def _flops(shape: Sequence[int]) -> int:
    num_rows, in_features, out_features = shape
    return 2 * num_rows * in_features * out_features
