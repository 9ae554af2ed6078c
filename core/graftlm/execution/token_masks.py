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
    forbidden = unpack_bits(~bits, scores.shape[1], scores.device)
    if instead is None and len(rows) == len(scores):
        scores.masked_fill_(forbidden, -torch.inf)
        return
    at = to_device(rows, scores.device)
    masked = scores.index_select(0, at).masked_fill_(forbidden, -torch.inf)
    if instead is not None:
        is_empty = masked.amax(dim=1, keepdim=True) == -torch.inf
        masked = torch.where(is_empty, instead.float().masked_fill(forbidden, -torch.inf), masked)
    scores.index_copy_(0, at, masked)


def unpack_bits(bits: NDArray[np.int32], num: int, device: torch.device) -> Tensor:
    """Return bits as booleans, bool [m, num]; `bits` are int32 [m, ceil(num / 32)], the lowest first."""
    packed = np.ascontiguousarray(bits).view(np.uint8)
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=num, bitorder="little").view(np.bool_))
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return ((to_device(packed, device)[:, :, None] >> places) & 1).flatten(1)[:, :num].bool()
