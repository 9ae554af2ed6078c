"""Computes the argmax and random draws over the vocabulary.

A draw has two levels: first over blocks of 128 tokens, then within one block. One pass reads the V columns, and
computes V / 128 sums per row. Noise for these sums takes almost no time, while noise for all V columns would take
longer than the pass.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["draw", "most_likely", "num_noise"]

_BLOCK_LEN: Final = 128


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's argmax, the first of equal numbers, and whether the row's largest number is not finite.

    Args:
        logits: [n, V], any floating dtype. A NaN counts as the largest number.

    Returns: int64 [n], always below V; bool [n].
    """
    if logits.device.type != "cpu":
        best, columns = logits.max(dim=1)  # a single kernel computes both
        return columns, best - best != 0  # the same as `~isfinite`, with a third of the kernel calls
    rows = logits.float().numpy()
    columns = rows.argmax(axis=1)  # numpy's argmax is vectorized, unlike torch's, and wakes no threads
    best = rows[np.arange(len(rows)), columns]
    return torch.from_numpy(columns), torch.from_numpy(~np.isfinite(best))


def num_noise(vocab_size: int) -> int:
    """Return the number of random numbers that `draw` needs for a row of V columns."""
    return -(-vocab_size // _BLOCK_LEN) + _BLOCK_LEN


def draw(weights: Tensor, noise: Tensor) -> Tensor:
    """Draw one column per row, with probability proportional to its weight: first a block, then a column of the block.

    Each draw is an exponential race: the column with the largest weight / noise is drawn. A relative rounding error of
    1e-6 in the weights then changes one draw in a million. The inverse of a cumulative sum would be worse: rounding
    would change all draws of columns whose weight is below the rounding error of the sum, and a vocabulary has many
    such columns.

    Args:
        weights: float32 [n, V], not negative; their sum need not be 1.
        noise: float64 [n, num_noise(V)], independent exponentially distributed numbers above 0.

    Returns: int64 [n], always below V; undefined for a row with NaN or with only zeros.
    """
    sums = _per_block(weights, lambda part: part.sum(dim=-1))
    num_blocks = sums.shape[1]
    block = (sums / noise[:, :num_blocks]).argmax(dim=1)
    within, columns = _block_of(weights, block)
    within = within.masked_fill(columns >= weights.shape[1], 0.0)
    chosen = (within / noise[:, num_blocks:]).argmax(dim=1, keepdim=True)
    return columns.gather(1, chosen).squeeze(1).clamp(max=weights.shape[1] - 1)


def _per_block(x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce [n, V] to [n, ceil(V / 128)]; the last block may be shorter."""
    num_full, tail_len = divmod(x.shape[1], _BLOCK_LEN)
    blocks = reduce(x[:, : x.shape[1] - tail_len].reshape(len(x), num_full, _BLOCK_LEN))
    if tail_len == 0:
        return blocks
    tail = reduce(x[:, x.shape[1] - tail_len :].unsqueeze(1))
    return torch.cat([blocks, tail], dim=1)


def _block_of(x: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Return one block per row: values [n, 128] and their columns [n, 128].

    The last block may contain columns past the end of x; their values repeat the last column.
    """
    columns = block[:, None] * _BLOCK_LEN + torch.arange(_BLOCK_LEN, device=x.device)
    return x.gather(1, columns.clamp(max=x.shape[1] - 1)), columns
