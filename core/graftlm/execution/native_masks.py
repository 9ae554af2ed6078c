"""Applies token masks on a CPU with a compiled kernel, if it is available."""

import ctypes
import logging
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.errors import InvariantError
from graftlm.layers.kernel_build import KernelBuildError, load_library

__all__ = ["NativeMasks"]

_logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("token_masks.cpp")
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
#: Minimum number of scores for which several threads are faster than one.
_PARALLEL_SCORES: Final = 1 << 16


class NativeMasks:
    """Sets the scores of forbidden tokens to -inf, in one pass that does not read scores.

    Args:
        library: the library compiled from token_masks.cpp.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._forbid: Any = library.graftlm_forbid_float32
        self._forbid.argtypes = [_ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE]
        self._forbid.restype = None

    @classmethod
    def load(cls, compiler: str, cache_dir: Path) -> Self | None:
        """Load the kernel, and compile it first if necessary. If this fails, log a message and return None."""
        try:
            return cls(load_library(_SOURCE, compiler, cache_dir))
        except KernelBuildError as error:
            _logger.info("token masks use numpy instead of a compiled kernel: %s", error)
            return None

    def forbid(self, scores: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
        """Apply masks to rows of scores.

        Args:
            scores: float32 [n, V] on the host, contiguous; changed in place.
            rows: int64 [m], unique.
            bits: int32 [m, ceil(V / 32)], see `TokenMask`.

        Raises:
            InvariantError: shapes, dtypes or rows do not match.
        """
        num_columns = scores.shape[1]
        places = np.ascontiguousarray(rows, dtype=np.int64)
        words = np.ascontiguousarray(bits)
        # Check the arguments here, because the kernel does not check them.
        fits = scores.dtype is torch.float32 and scores.device.type == "cpu" and scores.is_contiguous()
        inside = not len(places) or (places.min() >= 0 and places.max() < len(scores))
        if not fits or not inside or words.shape != (len(places), -(-num_columns // 32)) or words.dtype != np.int32:
            raise InvariantError(
                f"expected contiguous float32 scores [n, V], rows below n and int32 masks [m, ceil(V / 32)], got "
                f"{scores.dtype} {list(scores.shape)}, rows {places.tolist()} and {words.dtype} {list(words.shape)}"
            )
        is_small = len(places) * num_columns < _PARALLEL_SCORES
        self._forbid(
            scores.data_ptr(), num_columns, places.ctypes.data, words.ctypes.data, *words.shape,
            1 if is_small else torch.get_num_threads(),
        )  # fmt: skip
