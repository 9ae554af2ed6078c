"""Tokens chosen on a CPU by compiled kernels, where there is a compiler."""

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
#: From so many logits on, in several rows, a second thread gains more than waking it costs.
_PARALLEL_LOGITS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How m rows are drawn from.

    Attributes:
        temperature, top_p, min_p: float64 [m]; top_p 1 and min_p 0 keep all.
        top_k: int64 [m], at least 1; V or more keeps all.
        keys: int64 [m], from `noise_keys`.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    keys: NDArray[np.int64]


class NativeSampling:
    """Does `most_likely` and `draw` of `vocab_blocks` and the filters between, one row at a time.

    With the same noise it draws what they draw, unless a number decides that the two have rounded differently: sums of
    weights, which they add in another order, and weights beside the bounds of top-p and min-p, which they compare as
    probabilities. That is about one draw in a million; more where many tokens are as likely as a bound to seven digits.

    Args:
        library: compiled from sampling.cpp.
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
        """Compile the kernels if need be, and load them; None, and a line in the log, where that cannot be done."""
        try:
            return cls(load_library(_SOURCE, compiler, cache_dir))
        except KernelBuildError as error:
            _logger.info("tokens are chosen by torch's operations, not by compiled ones: %s", error)
            return None

    def takes(self, logits: Tensor) -> bool:
        """Whether logits lie where, and as, the kernels read them."""
        return logits.dtype in _DTYPES and logits.device.type == "cpu" and logits.stride(1) == 1

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `vocab_blocks.most_likely` does.

        Args:
            logits: [n, V], which it `takes`.
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
        """Draw a column of each of some rows.

        Args:
            logits: [n, V], which it `takes`; not changed.
            rows: int64 [m].

        Returns: int64 [m], always below V; meaningless for a row whose largest logit is not finite.

        Raises:
            InvariantError: they do not fit together.
        """
        self._check(logits)
        num_rows = len(rows)
        # The kernel trusts its pointers, so a mistake must stop here.
        inside = not num_rows or (rows.min() >= 0 and rows.max() < len(logits) and settings.top_k.min() >= 1)
        lens = {len(column) for column in (settings.top_k, settings.keys, settings.temperature, settings.top_p)}
        if not inside or {*lens, len(settings.min_p)} != {num_rows}:
            raise InvariantError(f"expected {num_rows} rows below {len(logits)}, top_k above 0, and as many of each")
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
                f"expected logits of float32 or bfloat16 on the CPU whose columns lie side by side, got {logits.dtype} "
                f"{list(logits.shape)} on {logits.device}, strides {logits.stride()}"
            )


def _num_threads(num_rows: int, num_columns: int) -> int:
    """Return how many threads share the rows; one row is one thread's."""
    return 1 if num_rows == 1 or num_rows * num_columns < _PARALLEL_LOGITS else torch.get_num_threads()
