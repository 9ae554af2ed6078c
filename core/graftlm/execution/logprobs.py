"""Log-probabilities of tokens, from a model's unmodified logits."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["TokenLogprobs", "token_logprobs"]

#: Number of logits in a chunk that is converted to float32, to limit memory for long prompts.
_CHUNK_LOGITS: Final = 2**24


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities of n tokens, and of the k most likely tokens at each of these positions, on the device.

    Attributes:
        token_logprobs: float32 [n].
        top_ids: int64 [n, k], most likely first.
        top_logprobs: float32 [n, k].
    """

    token_logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def token_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> TokenLogprobs:
    """Return the log-probabilities of target tokens, and the most likely tokens with their log-probabilities.

    Args:
        logits: [n, V], any floating dtype.
        targets: int64 [n], the target token ids, on the same device.
        num_top: k, number of most likely tokens to return; values above V are reduced to V.

    Memory: about 64 MiB in addition to the result, independent of n.
    """
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    result = TokenLogprobs(
        logits.new_empty(num_rows, dtype=torch.float32),
        targets.new_empty(num_rows, num_top),
        logits.new_empty(num_rows, num_top, dtype=torch.float32),
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
    return result
