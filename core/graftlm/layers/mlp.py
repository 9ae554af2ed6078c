"""The gated feed-forward layer (arXiv:2002.05202)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from graftlm.layers.activation import activation
from graftlm.layers.linear import Linear
from graftlm.layers.ops import LayerOps, TorchOps
from graftlm.layers.weights import WeightSlot

__all__ = ["GatedMLP"]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up as one matrix.

    Args:
        hidden_size: of input and output.
        intermediate_size: of gate and up, each.
        hidden_act: name of the activation in config.json.
        bias: whether the three projections have one.
        gate_up: the checkpoint's names of gate and up, or of the one tensor that holds both.
        device, dtype: of the parameters.

    Raises:
        UnsupportedArchitectureError: there is no such activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        *,
        bias: bool = False,
        gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        sizes = dict.fromkeys(gate_up, 2 * intermediate_size // len(gate_up))
        self.gate_up = Linear(hidden_size, sizes, bias=bias, device=device, dtype=dtype)
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, bias=bias, device=device, dtype=dtype)
        activation(hidden_act)  # an unknown one is an error now, not in the first step
        self._hidden_act = hidden_act
        self.ops: LayerOps = TorchOps()

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        out: Tensor = self.down(self.ops.act_and_mul(self.gate_up(x), self._hidden_act))
        return out

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that activate."""
        self.ops = ops

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield where gate, up and `down_proj` go."""
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(prefix)
