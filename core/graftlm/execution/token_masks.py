"""Rows of logits that may sample only some tokens."""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device

__all__ = ["forbid", "unpack_bits"]

#: The bits of a float32 that are clear in minus infinity.
_FRACTION_BITS: Final = 0x007F_FFFF

#: How many numbers of 4 bytes are worked on at a time.
_BLOCK_NUMBERS: Final = 1 << 17

#: With more tokens than this to a change between allowed and forbidden, a masked copy is faster than arithmetic.
_COPY_TOKENS_PER_CHANGE: Final = 16


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
    """Do `_write` for float32, in blocks of rows that stay in the processor's cache.

    A masked copy takes a branch by element: the fastest where tokens that follow each other are mostly allowed or
    forbidden together, as within a JSON string, and several times slower than arithmetic where they are not.
    """
    num_columns = scores.shape[1]
    words = bits
    if len(rows) < len(scores):
        words = np.full((len(scores), bits.shape[1]), -1, dtype=np.int32)
        words[rows] = bits
    write = _copy_forbidden if _num_changes(bits) * _COPY_TOKENS_PER_CHANGE < bits.size * 32 else _compute_forbidden
    num_rows = max(1, _BLOCK_NUMBERS // num_columns)
    for start in (np.unique(rows // num_rows) * num_rows).tolist():
        allowed = unpack_bits(words[start : start + num_rows], num_columns)
        write(scores[start : start + num_rows], allowed)


def _num_changes(bits: NDArray[np.int32]) -> int:
    """Return how often a bit differs from the one before it, within words."""
    return int(np.bitwise_count(bits ^ (bits << 1)).sum(dtype=np.int64))


def _copy_forbidden(block: Tensor, allowed: NDArray[np.bool_]) -> None:
    np.copyto(block.numpy(), -np.inf, where=~allowed)


def _compute_forbidden(block: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Compute minus infinity from the numbers' bits."""
    numbers = block.view(torch.int32)
    forbidden = torch.from_numpy(allowed.view(np.uint8)).to(torch.int32).sub_(1)  # all ones, else 0
    numbers.bitwise_or_(forbidden)
    numbers.bitwise_and_(forbidden.bitwise_and_(_FRACTION_BITS).bitwise_not_())  # -inf is all but these


def unpack_bits(bits: NDArray[np.int32], num: int) -> NDArray[np.bool_]:
    """Return bits as booleans, bool [m, num]; `bits` are int32 [m, ceil(num / 32)], the lowest first."""
    packed = np.ascontiguousarray(bits).view(np.uint8)
    return np.unpackbits(packed, axis=1, count=num, bitorder="little").view(np.bool_)
