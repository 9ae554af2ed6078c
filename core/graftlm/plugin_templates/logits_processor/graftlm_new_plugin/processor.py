"""The logits processor, which subtracts a penalty from the logits of recent tokens."""

import torch
from graftlm.contracts import LogitsProcessor
from graftlm.types import TokenIds
from torch import Tensor

from graftlm_new_plugin.options import RecentPenaltyOptions

__all__ = ["RecentPenalty"]


class RecentPenalty(LogitsProcessor):
    """A processor that subtracts a penalty from the logit of each token in the recent output. It has no state."""

    def __init__(self, options: RecentPenaltyOptions) -> None:
        self._penalty = options.penalty
        self._window_tokens = options.window_tokens

    def process(self, output_token_ids: TokenIds, logits: Tensor) -> Tensor:
        """Return the logits, float32 [V], with the penalty subtracted for recent tokens."""
        recent = sorted(set(output_token_ids[-self._window_tokens :].tolist()))
        logits[torch.tensor(recent, dtype=torch.long, device=logits.device)] -= self._penalty
        return logits
