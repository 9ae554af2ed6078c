"""The samples of a step with drafts: the drafts before each sample, and which samples count."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device
from graftlm.plan import StepPlan

__all__ = ["DraftSamples"]


@dataclass(frozen=True, slots=True)
class DraftSamples:
    """The drafts before each of S samples. A request with n drafts has n + 1 consecutive samples.

        input      last   d1   d2   d3
        sample       s0   s1   s2   s3
        depth         0    1    2    3
        counts      yes   if s0 = d1   if also s1 = d2   if also s2 = d3

    Attributes:
        depths: int64 [S], number of the request's drafts before each sample.
        before: int64 [S], token id of the draft directly before each sample; undefined at depth 0.
        firsts: int64 [S], for each sample, index of its request's sample of depth 0.
        lasts: int64 [B'], index of the last sample of each of the B' requests that sample.
    """

    depths: NDArray[np.int64]
    before: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]

    @classmethod
    def of(cls, plan: StepPlan) -> "DraftSamples | None":
        """Return the draft samples of a plan; None if no request has drafts."""
        if plan.num_drafts is None:
            return None
        is_first = np.diff(plan.sample_idx, prepend=-1) != 0
        firsts = np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))
        return cls(
            depths=np.arange(len(is_first)) - firsts,
            before=plan.input_ids[plan.sample_token_idx],
            firsts=firsts,
            lasts=np.flatnonzero(np.append(is_first[1:], True)),
        )

    @property
    def firsts_of_requests(self) -> NDArray[np.int64]:
        """For each request that samples, the index of its sample of depth 0: int64 [B']."""
        return self.firsts[self.lasts]

    def prefix(self, sample: int) -> NDArray[np.int64]:
        """Return the drafts before a sample, int64 [depth]."""
        return self.before[self.firsts[sample] + 1 : sample + 1]

    def counted(self, token_ids: Tensor) -> Tensor:
        """Return which samples count, bool [S] on the device. A sample counts if all drafts before it were accepted.

        Args:
            token_ids: int64 [S], the sampled tokens.
        """
        device = token_ids.device
        before, depths = to_device(self.before, device), to_device(self.depths, device)
        differs = torch.zeros_like(token_ids)
        differs[1:] = token_ids[:-1] != before[1:]
        differs.masked_fill_(depths == 0, 0)
        so_far = differs.cumsum(0)
        return so_far == so_far.index_select(0, to_device(self.firsts, device))

    def latest(self, token_ids: Tensor, counted: Tensor) -> Tensor:
        """Return the last sampled token that counts, for each request that samples: int64 [B'] on the device.

        Args:
            token_ids: int64 [S], the sampled tokens.
            counted: bool [S], see `counted`.
        """
        return token_ids.index_select(0, self.latest_idx(counted))

    def latest_idx(self, counted: Tensor) -> Tensor:
        """Return the index of the last sample that counts, for each request that samples: int64 [B'] on the device."""
        so_far = counted.cumsum(0)
        firsts = to_device(self.firsts_of_requests, counted.device)
        lasts = to_device(self.lasts, counted.device)
        return firsts + so_far.index_select(0, lasts) - so_far.index_select(0, firsts)
