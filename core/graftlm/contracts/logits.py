"""The contract of a logits processor, which changes the logits of one request."""

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
    """The arguments of a processor's `create`.

    Attributes:
        vocab_size: V, number of columns of the logits.
        prompt_token_ids: int32 [n], the request's prompt.
    """

    vocab_size: int
    prompt_token_ids: TokenIds


class LogitsProcessor(ABC):
    """Changes the logits of one request before sampling. It is created at each admission of the request.

    Invariants, each checked by `graftlm.testing.LogitsProcessorConformance`:
        - The result depends only on the arguments and the creation context. After a retraction, the same tokens
          therefore give the same logits.
        - Processors of two requests are independent.
        - If the caller changes the arrays after `process` has returned, later results do not change: a processor stores
          only copies.
        - At least one logit is not -inf, and none is NaN.
    """

    @abstractmethod
    def process(self, output_token_ids: TokenIds, logits: Tensor) -> Tensor:
        """Return the logits from which the next token is sampled.

        Args:
            output_token_ids: int32 [n], the tokens generated so far.
            logits: float32 [V], may be changed in place.

        Returns: float32 [V], on the same device.

        If the method raises, only this request fails.
        """
