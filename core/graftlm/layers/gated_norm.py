"""Root-mean-square normalisation of groups of features with a gate, as in Mamba 2 and gated delta networks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.layers.weights import WeightSlot, empty_parameter

__all__ = ["GatedRMSNorm"]


class GatedRMSNorm(nn.Module):
    """Normalises each group of features separately. The gate passes through SiLU.

        gate first     weight * norm(x * silu(gate))      Mamba 2
        gate last      weight * norm(x) * silu(gate)      gated delta networks

    Args:
        size: number of features.
        num_groups: number of groups of consecutive features.
        eps: number that is added to the mean square.
        gate_first: whether x is multiplied with the gate before the normalisation.
        device, dtype: device and dtype of the weight.
    """

    def __init__(
        self, size: int, num_groups: int, eps: float, *, gate_first: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._num_groups = num_groups
        self._eps = eps
        self._gate_first = gate_first
        self.weight = empty_parameter(size, device=device, dtype=dtype)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x [..., size], float32 or of the weight's dtype; return the weight's dtype."""
        opening = F.silu(gate.float())
        x = x.float() * opening if self._gate_first else x.float()
        grouped = x.view(*x.shape[:-1], self._num_groups, -1)
        normalised = F.rms_norm(grouped, grouped.shape[-1:], None, self._eps).flatten(-2)
        scaled = self.weight * normalised.to(self.weight.dtype)
        return scaled if self._gate_first else (scaled * opening).to(self.weight.dtype)

    def weight_slots(self, prefix: str, name: str) -> Iterator[WeightSlot]:
        """Yield the slot of `{prefix}{name}.weight`."""
        yield WeightSlot(f"{prefix}{name}.weight", self.weight)
