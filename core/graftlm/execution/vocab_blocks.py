"""Searches over the vocabulary in two levels: first over blocks of tokens, then within one block.

One pass reads the V columns and leaves V / 128 numbers a row. What is then done with those, in double precision or with
an index, costs nothing, where doing it over all V columns would cost more than the pass.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

__all__ = ["argmax", "inverse_cdf"]

_BLOCK_LEN: Final = 128


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest value and its column. A NaN counts as the largest.

    Args:
        x: [n, V], any floating dtype.

    Returns: values [n] in x's dtype; columns int64 [n], always below V.
    """
    if x.device.type != "cpu":
        values, columns = x.max(dim=1)  # one kernel
        return values, columns
    values, block = _per_block(x, lambda part: part.amax(dim=-1)).max(dim=1)
    within, columns = _block_of(x, block)
    return values, columns.gather(1, within.argmax(dim=1, keepdim=True)).squeeze(1)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one column a row, with probability proportional to its weight, in the order of the columns.

    A row's result depends on that row alone. A column of weight 0 is never drawn, however the sums round.

    Args:
        weights: float32 [n, V], not negative; they need not sum to 1.
        uniform: float64 [n], in [0, 1).

    Returns: int64 [n], always below V; meaningless for a row with NaN.
    """
    block_ends = _per_block(weights, lambda part: part.sum(dim=-1)).double().cumsum(dim=1)
    target = uniform * block_ends[:, -1]
    block = _first_beyond(block_ends, target)
    before = block_ends.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1).where(block > 0, 0.0)
    within, columns = _block_of(weights, block)
    within = within.double().masked_fill(columns >= weights.shape[1], 0.0)
    chosen = _first_beyond(within.cumsum(dim=1), target - before)
    return columns.gather(1, chosen[:, None]).squeeze(1).clamp(max=weights.shape[1] - 1)


def _first_beyond(ends: Tensor, target: Tensor) -> Tensor:
    """Return the first index whose cumulative sum exceeds the target.

    Where rounding lets none exceed it: the last index that adds anything. Either has a weight above 0.
    """
    first = (ends <= target[:, None]).sum(dim=1)
    last = (ends < ends[:, -1:]).sum(dim=1)
    return torch.minimum(first, last)


def _per_block(x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce [n, V] to [n, ceil(V / 128)]; the last block may be shorter."""
    num_full, tail_len = divmod(x.shape[1], _BLOCK_LEN)
    blocks = reduce(x[:, : x.shape[1] - tail_len].reshape(len(x), num_full, _BLOCK_LEN))
    if tail_len == 0:
        return blocks
    tail = reduce(x[:, x.shape[1] - tail_len :].unsqueeze(1))
    return torch.cat([blocks, tail], dim=1)


def _block_of(x: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Return one block a row as values [n, 128] and their columns [n, 128].

    Columns past the last of x are listed too; their values repeat the last column's.
    """
    columns = block[:, None] * _BLOCK_LEN + torch.arange(_BLOCK_LEN, device=x.device)
    return x.gather(1, columns.clamp(max=x.shape[1] - 1)), columns
