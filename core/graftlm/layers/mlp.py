"""The gated feed-forward layer (arXiv:2002.05202)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from graftlm.contracts import Shard
from graftlm.layers.linear import GatedLinear, Linear, as_shard
from graftlm.layers.weights import WeightSlot

__all__ = ["GatedMLP"]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up as one matrix.

    Args:
        hidden_size: size of input and output.
        intermediate_size: output size of gate and of up, or the rank's part of it.
        hidden_act: name of the activation in config.json.
        bias: whether the three projections have a bias.
        gate_up: names in the checkpoint of gate and up, or of the one tensor with both.
        down: name in the checkpoint of the projection after them.
        device, dtype: device and dtype of the parameters.

    Raises:
        UnsupportedArchitectureError: there is no such activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int | Shard,
        hidden_act: str,
        *,
        bias: bool = False,
        gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        inner = as_shard(intermediate_size)
        sizes = dict.fromkeys(gate_up, inner if len(gate_up) > 1 else inner.then(inner))
        self.gate_up = GatedLinear(hidden_size, sizes, hidden_act, bias=bias, device=device, dtype=dtype)
        self.down = Linear(inner, {down: hidden_size}, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        out: Tensor = self.down(self.gate_up(x))
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of gate, up and down."""
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(prefix)
