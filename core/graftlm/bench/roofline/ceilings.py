"""The machine's two ceilings: how fast memory is read, and how fast matrices are multiplied."""

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
    """How much is measured.

    Attributes:
        read_bytes: what is read in one go; several times the caches, or their speed is measured.
        matrix_shapes: (M, K, N) of the products, of which the fastest counts.
        rounds: in each, the ceilings and every case have a turn.
        turn_s: seconds of a case's turn, after which it runs no further step; it runs one at least.
    """

    read_bytes: int = _GIB
    matrix_shapes: tuple[tuple[int, int, int], ...] = ((512, 1024, 4096), (2048, 1024, 4096), (2048, 2048, 2048))
    rounds: int = 7
    turn_s: float = 0.2

    @classmethod
    def for_device(cls, device: torch.device, rounds: int) -> "Effort":
        """Return one that keeps a device busy: a GPU needs more."""
        if device.type == "cpu":
            return cls(rounds=rounds)
        shapes = ((4096, 4096, 4096), (8192, 4096, 8192), (8192, 8192, 8192))
        return cls(4 * _GIB, shapes, rounds)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do at most, as measured.

    Attributes:
        read_bytes_per_s: streaming reads.
        read_by: the operation that read fastest.
        read_bytes: how much it read in one go.
        matrix_flops_per_s: of a matrix product in the model's dtype.
        matrix_shape: (M, K, N) of the fastest one.
        dtype: of the product.
    """

    read_bytes_per_s: float
    read_by: str
    read_bytes: int
    matrix_flops_per_s: float
    matrix_shape: tuple[int, int, int]
    dtype: str

    def seconds(self, cost: Cost) -> dict[Bound, float]:
        """Return the time that a cost takes at each ceiling."""
        return {"memory": cost.num_bytes / self.read_bytes_per_s, "matrix": cost.flops / self.matrix_flops_per_s}


class CeilingProbe:
    """Measures the ceilings, a sample at a time, so that samples can alternate with what is compared to them.

    Effects: holds `effort.read_bytes` of memory, and the matrices, while it lives.
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
            run()  # the first time, memory is handed out and kernels are looked up

    def sample(self) -> None:
        """Time each way to read, and each product, once."""
        for name, read in self._reads.items():
            self._read_s[name].append(self._timed(read))
        for shape, product in self._products.items():
            self._product_s[shape].append(self._timed(product))

    def ceilings(self) -> Ceilings:
        """Return the best of the medians of what was sampled."""
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


#: A row of the matrix that `mv` reads, in float32.
_ROW_LEN = 1 << 12
_ROW_BYTES = 4 * _ROW_LEN


def _reads(num_bytes: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return ways to read that much once; which is fastest differs between machines."""
    data = torch.ones(num_bytes // _ROW_BYTES, _ROW_LEN, device=device)
    flat, vector = data.view(-1), torch.ones(_ROW_LEN, device=device)
    return {
        "sum": lambda: flat.sum(),
        "dot": lambda: torch.dot(flat, flat),
        "matrix-vector product": lambda: torch.mv(data, vector),
    }


def _product(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a product as the layers compute it, with packed weights where these pay."""
    num_rows, in_features, out_features = shape
    x = torch.randn(num_rows, in_features, device=device).to(dtype)
    weight = torch.randn(out_features, in_features, device=device).to(dtype)
    packed = choose_ops(device, dtype, user_cache_dir(os.environ)).pack(weight)
    return lambda: linear(x, weight, packed)


def _flops(shape: Sequence[int]) -> int:
    num_rows, in_features, out_features = shape
    return 2 * num_rows * in_features * out_features
