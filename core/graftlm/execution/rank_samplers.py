"""The samplers of several ranks: rank 0 samples, and the other ranks receive the tokens.

The next step reads tokens that are only on the device. Every rank needs them to look up their embeddings.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import Communicator
from graftlm.execution.draft_samples import DraftSamples
from graftlm.execution.sampler import Sampled, TokenSampler
from graftlm.plan import RowSetup, TokenMask

__all__ = ["FollowingSampler", "LeadingSampler"]


class LeadingSampler:
    """Samples with another sampler, and sends the tokens to all other ranks.

    Args:
        sampler: samples the tokens.
        communicator: the communicator of rank 0.
    """

    def __init__(self, sampler: TokenSampler, communicator: Communicator) -> None:
        self._sampler = sampler
        self._communicator = communicator

    def set_row(self, setup: RowSetup) -> None:
        """Set a row's request."""
        self._sampler.set_row(setup)

    def sample(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        token_mask: TokenMask | None = None,
        drafts: DraftSamples | None = None,
    ) -> Sampled:
        """Sample S tokens, and send them; see `Sampler.sample`."""
        sampled = self._sampler.sample(logits, rows, positions, token_mask, drafts)
        self._communicator.broadcast(sampled.token_ids, 0)
        return sampled


class FollowingSampler:
    """Receives the tokens that rank 0 samples.

    Args:
        communicator: the communicator of this rank.
        device: device of the tokens.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device

    def set_row(self, setup: RowSetup) -> None:
        """Do nothing, because rank 0 has the parameters of requests."""

    def sample(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        token_mask: TokenMask | None = None,
        drafts: DraftSamples | None = None,
    ) -> Sampled:
        """Receive S tokens. No sample counts as failed."""
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        self._communicator.broadcast(token_ids, 0)
        failed = torch.zeros(len(rows), dtype=torch.bool, device=self._device)
        return Sampled(token_ids, failed, {}, None, None if drafts is None else drafts.counted(token_ids))
