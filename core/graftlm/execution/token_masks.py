"""Applies token masks to rows of logits."""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device
from graftlm.execution.native_masks import NativeMasks

__all__ = ["forbid"]

#: Number of 4-byte numbers per block; a block fits in a core's cache.
_BLOCK_NUMBERS: Final = 1 << 17

#: Byte of a bitmask -> upper bounds of the scores of its 8 tokens: -inf if the bit is not set, else NaN, which `fmin`
#: ignores.
_BOUNDS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.nan, -np.inf
).astype(np.float32)


def forbid(
    scores: Tensor,
    rows: NDArray[Any],
    bits: NDArray[np.int32],
    fallback: Tensor | None = None,
    native: NativeMasks | None = None,
) -> None:
    """Set the scores of all forbidden tokens to -inf.

    Args:
        scores: float32 [n, V], changed in place.
        rows: int64 [m], ascending, unique rows of `scores`.
        bits: int32 [m, ceil(V / 32)], see `TokenMask`.
        fallback: [m, V], any floating dtype: scores that replace those of a row if all its allowed tokens have -inf.
        native: the kernel for a CPU; None: numpy is used.
    """
    _write(scores, rows, bits, native)
    if fallback is None:
        return
    at = to_device(rows, scores.device)
    masked = scores.index_select(0, at)
    is_empty = masked.amax(dim=1, keepdim=True) == -torch.inf
    others = fallback.to(torch.float32, copy=True)
    _write(others, np.arange(len(rows)), bits, native)
    scores.index_copy_(0, at, torch.where(is_empty, others, masked))


def _write(scores: Tensor, rows: NDArray[Any], bits: NDArray[np.int32], native: NativeMasks | None) -> None:
    """Set the scores of forbidden tokens to -inf, in place. Other scores are not written."""
    if native is not None and scores.device.type == "cpu" and scores.is_contiguous():
        native.forbid(scores, rows, bits)
        return
    if scores.device.type == "cpu":
        _write_on_host(scores, rows, bits)
        return
    from graftlm.execution.bitmask_kernel import forbid_in_place

    words = to_device(np.ascontiguousarray(bits), scores.device)
    forbid_in_place(scores, to_device(rows, scores.device), words)


def _write_on_host(scores: Tensor, rows: NDArray[Any], bits: NDArray[np.int32]) -> None:
    """Apply masks to float32 scores, in blocks that fit in the cache. The time does not depend on the mask."""
    num_columns = scores.shape[1]
    words = bits
    if len(rows) < len(scores):
        words = np.full((len(scores), bits.shape[1]), -1, dtype=np.int32)
        words[rows] = bits
    num_rows = max(1, _BLOCK_NUMBERS // num_columns)
    for start in (np.unique(rows // num_rows) * num_rows).tolist():
        block = scores[start : start + num_rows].numpy()
        packed = np.ascontiguousarray(words[start : start + num_rows]).view(np.uint8)
        bounds = _BOUNDS.take(packed, axis=0).reshape(len(block), -1)[:, :num_columns]
        np.fmin(block, bounds, out=block)
