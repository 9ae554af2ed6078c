"""The processor: recent tokens lose some of their logit."""

import torch
from graftlm.contracts import LogitsProcessor
from graftlm.types import TokenIds
from torch import Tensor

from graftlm_new_plugin.options import RecentPenaltyOptions

__all__ = ["RecentPenalty"]


class RecentPenalty(LogitsProcessor):
    """Takes a penalty from every token of the latest few; it keeps nothing from one step to the next."""

    def __init__(self, options: RecentPenaltyOptions) -> None:
        self._penalty = options.penalty
        self._window_tokens = options.window_tokens

    def process(self, output_token_ids: TokenIds, logits: Tensor) -> Tensor:
        """Return logits, float32 [V], less the penalty where a token is recent."""
        recent = sorted(set(output_token_ids[-self._window_tokens :].tolist()))
        logits[torch.tensor(recent, dtype=torch.long, device=logits.device)] -= self._penalty
        return logits
