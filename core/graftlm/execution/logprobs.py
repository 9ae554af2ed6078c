"""Log-probabilities of tokens, from a model's unmodified logits."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TokenLogprobs", "padded_ids", "token_logprobs"]

#: Number of logits in a chunk that is converted to float32, to limit memory for long prompts.
_CHUNK_LOGITS: Final = 2**24


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities of n tokens, and of the k most likely tokens at each of these positions, on the device.

    Attributes:
        token_logprobs: float32 [n].
        top_ids: int64 [n, k], most likely first.
        top_logprobs: float32 [n, k].
        requested: float32 [n, m], of further tokens; None if there are none.
    """

    token_logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    requested: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> "TokenLogprobs":
        """Return the results of a function for the parts."""
        requested = None if self.requested is None else function(self.requested)
        return TokenLogprobs(
            function(self.token_logprobs), function(self.top_ids), function(self.top_logprobs), requested
        )


def padded_ids(ids: Sequence[Sequence[int]]) -> NDArray[np.int64] | None:
    """Return lists of token ids as an array [n, m], with 0 past the end of a list; None if all lists are empty."""
    width = max(map(len, ids), default=0)
    if not width:
        return None
    padded = np.zeros((len(ids), width), dtype=np.int64)
    for row, row_ids in zip(padded, ids, strict=True):
        row[: len(row_ids)] = row_ids
    return padded


def token_logprobs(logits: Tensor, targets: Tensor, num_top: int, requested: Tensor | None = None) -> TokenLogprobs:
    """Return the log-probabilities of target tokens, and the most likely tokens with their log-probabilities.

    Args:
        logits: [n, V], any floating dtype.
        targets: int64 [n], the target token ids, on the same device.
        num_top: k, number of most likely tokens to return; values above V are reduced to V.
        requested: int64 [n, m], further tokens for each row, on the same device; None: no further tokens.

    Memory: about 64 MiB in addition to the result, independent of n.
    """
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    result = TokenLogprobs(
        logits.new_empty(num_rows, dtype=torch.float32),
        targets.new_empty(num_rows, num_top),
        logits.new_empty(num_rows, num_top, dtype=torch.float32),
        None if requested is None else logits.new_empty(requested.shape, dtype=torch.float32),
    )
    step = max(1, _CHUNK_LOGITS // vocab_size)
    for start in range(0, num_rows, step):
        chunk = slice(start, start + step)
        scores = logits[chunk].float()
        norm = scores.logsumexp(dim=1, keepdim=True)
        top = scores.topk(num_top, dim=1)
        result.token_logprobs[chunk] = (scores.gather(1, targets[chunk, None]) - norm).squeeze(1)
        result.top_ids[chunk] = top.indices
        result.top_logprobs[chunk] = top.values - norm
        if requested is not None and result.requested is not None:
            result.requested[chunk] = scores.gather(1, requested[chunk]) - norm
    return result
