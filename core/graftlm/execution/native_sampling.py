"""Samples on a CPU with compiled kernels, if they are available."""

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.errors import InvariantError
from graftlm.layers.kernel_build import KernelBuildError, load_library

__all__ = ["DrawSettings", "NativeSampling"]

_logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("sampling.cpp")
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
_DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
#: Minimum number of logits, in several rows, for which several threads are faster than one.
_PARALLEL_LOGITS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Sampling parameters of m rows.

    The sampler creates one per step for the rows that the compiled kernels sample.

    Attributes:
        temperature, top_p, min_p: float64 [m]; with top_p 1 and min_p 0, all tokens are kept.
        top_k: int64 [m], at least 1; with V or more, all tokens are kept.
        keys: int64 [m], noise keys from `noise_keys`.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    keys: NDArray[np.int64]


class NativeSampling:
    """Implements `most_likely` and `draw` of `vocab_blocks`, and the sampling filters, one row at a time.

    With the same noise, it draws the same tokens as these functions, up to rounding: the functions add weights in
    another order, and compare probabilities instead of weights with the bounds of top-p and min-p. About one draw in a
    million differs, or more if many tokens' probabilities equal a bound to seven digits.

    Args:
        library: the library compiled from sampling.cpp.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._most_likely = self._functions(library, "most_likely", [_ADDRESS, *[_SIZE] * 3, *[_ADDRESS] * 2, _SIZE])
        self._draw = self._functions(library, "draw", [_ADDRESS, *[_SIZE] * 3, *[_ADDRESS] * 3, _SIZE])

    @staticmethod
    def _functions(library: ctypes.CDLL, name: str, types: list[Any]) -> dict[torch.dtype, Any]:
        functions = {}
        for dtype, suffix in _DTYPES.items():
            function = functions[dtype] = getattr(library, f"graftlm_{name}_{suffix}")
            function.argtypes, function.restype = types, None
        return functions

    @classmethod
    def load(cls, compiler: str, cache_dir: Path) -> Self | None:
        """Load the kernels, and compile them first if necessary. If this fails, log a message and return None."""
        try:
            return cls(load_library(_SOURCE, compiler, cache_dir))
        except KernelBuildError as error:
            _logger.info("sampling uses torch's operations instead of compiled kernels: %s", error)
            return None

    def takes(self, logits: Tensor) -> bool:
        """Return whether the kernels support the logits' device, dtype and column stride."""
        return logits.dtype in _DTYPES and logits.device.type == "cpu" and logits.stride(1) == 1

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `vocab_blocks.most_likely`.

        Args:
            logits: [n, V], for which `takes` is True.
        """
        num_rows, num_columns = logits.shape
        self._check(logits)
        columns, is_bad = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        self._most_likely[logits.dtype](
            logits.data_ptr(), logits.stride(0), num_rows, num_columns, columns.data_ptr(), is_bad.data_ptr(),
            _num_threads(num_rows, num_columns),
        )  # fmt: skip
        return columns, is_bad

    def draw(self, logits: Tensor, rows: NDArray[np.int64], settings: DrawSettings) -> Tensor:
        """Draw one column for each selected row.

        Args:
            logits: [n, V], for which `takes` is True; not changed.
            rows: int64 [m].

        Returns: int64 [m], always below V; undefined for a row whose largest logit is not finite.

        Raises:
            InvariantError: shapes, dtypes or rows do not match.
        """
        self._check(logits)
        num_rows = len(rows)
        # Check the arguments here, because the kernel does not check them.
        inside = not num_rows or (rows.min() >= 0 and rows.max() < len(logits) and settings.top_k.min() >= 1)
        lens = {len(column) for column in (settings.top_k, settings.keys, settings.temperature, settings.top_p)}
        if not inside or {*lens, len(settings.min_p)} != {num_rows}:
            raise InvariantError(
                f"expected {num_rows} rows below {len(logits)}, top_k >= 1 and {num_rows} of each setting, got "
                f"rows {rows.tolist()}, top_k {settings.top_k.tolist()} and settings of {sorted(lens)} rows"
            )
        whole = torch.from_numpy(np.array([rows, settings.top_k, settings.keys], dtype=np.int64))
        real = torch.from_numpy(np.array([settings.temperature, settings.top_p, settings.min_p], dtype=np.float64))
        columns = torch.zeros(num_rows, dtype=torch.int64)
        self._draw[logits.dtype](
            logits.data_ptr(), logits.stride(0), num_rows, logits.shape[1], whole.data_ptr(), real.data_ptr(),
            columns.data_ptr(), _num_threads(num_rows, logits.shape[1]),
        )  # fmt: skip
        return columns

    def _check(self, logits: Tensor) -> None:
        if not self.takes(logits) or not logits.shape[1]:
            raise InvariantError(
                f"expected float32 or bfloat16 logits on the CPU with columns of stride 1, got {logits.dtype} "
                f"{list(logits.shape)} on {logits.device}, strides {logits.stride()}"
            )


def _num_threads(num_rows: int, num_columns: int) -> int:
    """Return the number of threads to use. One thread computes each row."""
    return 1 if num_rows == 1 or num_rows * num_columns < _PARALLEL_LOGITS else torch.get_num_threads()
