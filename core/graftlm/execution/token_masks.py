"""Rows of logits that may sample only some tokens."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device

__all__ = ["forbid", "unpack_bits"]


def forbid(scores: Tensor, rows: NDArray[Any], bits: NDArray[np.int32], instead: Tensor | None = None) -> None:
    """Give all tokens but the allowed ones a score of minus infinity.

    Args:
        scores: float32 [n, V], changed in place.
        rows: int64 [m], ascending, each once; rows of `scores`.
        bits: int32 [m, ceil(V / 32)], as in `TokenMask`.
        instead: [m, V], any floating dtype: the scores of a row whose own rule out every allowed token.
    """
    _write(scores, rows, bits)
    if instead is None:
        return
    at = to_device(rows, scores.device)
    masked = scores.index_select(0, at)
    is_empty = masked.amax(dim=1, keepdim=True) == -torch.inf
    others = instead.to(torch.float32, copy=True)
    _write(others, np.arange(len(rows)), bits)
    scores.index_copy_(0, at, torch.where(is_empty, others, masked))


def _write(scores: Tensor, rows: NDArray[Any], bits: NDArray[np.int32]) -> None:
    """Write minus infinity, in place, where the masks of rows allow nothing; what is allowed is not touched."""
    if scores.device.type == "cpu":
        _write_on_host(scores, rows, bits)
        return
    from graftlm.execution.bitmask_kernel import forbid_in_place

    words = to_device(np.ascontiguousarray(bits), scores.device)
    forbid_in_place(scores, to_device(rows, scores.device), words)


def _write_on_host(scores: Tensor, rows: NDArray[Any], bits: NDArray[np.int32]) -> None:
    """Do `_write` in one call of numpy.

    numpy's masked copy searches the mask for runs and writes those: the masks of grammars are mostly long runs, where
    it takes a half to a quarter of the time of a `masked_fill_` that looks at each element. Rows without a mask are
    one run each, and cost less than copying the masked ones out and back.
    """
    forbidden = ~bits
    if len(rows) < len(scores):
        forbidden = np.zeros((len(scores), bits.shape[1]), dtype=np.int32)
        forbidden[rows] = ~bits
    np.copyto(scores.numpy(), np.float32(-np.inf), where=unpack_bits(forbidden, scores.shape[1]))


def unpack_bits(bits: NDArray[np.int32], num: int) -> NDArray[np.bool_]:
    """Return bits as booleans, bool [m, num]; `bits` are int32 [m, ceil(num / 32)], the lowest first."""
    packed = np.ascontiguousarray(bits).view(np.uint8)
    return np.unpackbits(packed, axis=1, count=num, bitorder="little").view(np.bool_)
