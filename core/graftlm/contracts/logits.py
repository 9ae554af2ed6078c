"""The contract of a logits processor: one request's own change to its logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graftlm.types import TokenIds

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogitsContext", "LogitsProcessor"]


@dataclass(frozen=True, slots=True)
class LogitsContext:
    """What a processor is created with.

    Attributes:
        vocab_size: V.
        prompt_token_ids: int32, the request's prompt.
    """

    vocab_size: int
    prompt_token_ids: TokenIds


class LogitsProcessor(ABC):
    """Changes the logits of one request before it is sampled; created anew each time the request is admitted.

    Invariants, each checked by `graftlm.testing.LogitsProcessorConformance`:
        - The result depends on the arguments and the creation context alone: after a retraction the same
          tokens give the same logits.
        - Processors of two requests know nothing of each other.
        - What becomes of the output and the logits after `process` changes no later result: it keeps copies, if any.
        - There is a token to sample: not all logits are -inf, and none is NaN.
    """

    @abstractmethod
    def process(self, output_token_ids: TokenIds, logits: Tensor) -> Tensor:
        """Return the logits to sample from.

        Args:
            output_token_ids: int32 [n], the tokens generated so far.
            logits: float32 [V], may be changed in place.

        Returns: float32 [V], same device. If this raises, the request fails and others go on.
        """
