"""The mixture of experts (arXiv:1701.06538): many gated feed-forward layers; each token uses a few of them.

    tokens [T] -> pairs of token and expert [T * K] -> sorted by expert -> two grouped products -> back in the tokens'
    order -> weighted sum over K

The number of Python calls depends on the number of experts, not on the number of tokens.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from graftlm.contracts import Shard
from graftlm.layers.activation import activation
from graftlm.layers.grouped_linear import GroupedLinear, RowGroups
from graftlm.layers.linear import as_shard
from graftlm.layers.ops import LayerOps, TorchOps
from graftlm.layers.router import Router, Routing
from graftlm.layers.weights import WeightSlot, cuts

__all__ = ["Experts", "GateFunction", "MoE", "routes_tokens"]

#: Maps the output of gate and up, [N, 2 I], to the input of down, [N, I].
GateFunction: TypeAlias = Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """E gated feed-forward layers, down(act(gate(x)) * up(x)); each row is computed by the experts chosen for it.

    Args:
        num_experts: E.
        hidden_size: D, size of input and output.
        intermediate_size: I, output size of gate and of up, or the rank's part of it.
        act: name of the activation in config.json, or a function from the output of gate and up, in the checkpoint's
            layout, to the input of down.
        bias: whether the projections have a bias.
        device, dtype: device and dtype of the parameters.

    Attributes:
        gate_up: gates and up projections, with weight [E, 2 I, D].
        down: down projections, with weight [E, D, I].

    Raises:
        UnsupportedArchitectureError: there is no such activation.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int | Shard,
        act: str | GateFunction,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if isinstance(act, str):
            activation(act)  # raises now for an unknown name, not in the first step
        gate_up, down = ("gate_proj", "up_proj"), ("down_proj",)
        self._act = act
        self._inner = inner = as_shard(intermediate_size)
        self._communicator = inner.communicator
        self.num_experts = num_experts
        self.gate_up = GroupedLinear(
            num_experts, hidden_size, 2 * inner.length, gate_up, bias=bias, device=device, dtype=dtype
        )
        adds_bias = bias and inner.parallel.rank == 0  # the outputs of all ranks are added up
        self.down = GroupedLinear(
            num_experts, inner.length, hidden_size, down, bias=adds_bias, device=device, dtype=dtype
        )
        self._has_bias = bias
        self.ops: LayerOps = TorchOps()

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Map [T, D] to [T, D]: the weighted sum of the outputs of each token's K experts."""
        num_tokens, top_k = routing.expert_ids.shape
        expert_ids, pair_ids = routing.expert_ids.flatten().sort(stable=True)
        groups = RowGroups.of(expert_ids, self.num_experts)
        gate_up = self.gate_up(x[pair_ids // top_k], groups)  # [T * K, 2 I]
        down = self.down(self._activate(gate_up), groups)  # [T * K, D]
        # Outputs are gathered by index, not added by index, because the order of atomic additions varies, and so would
        # the sums.
        outputs = torch.empty_like(down).index_copy_(0, pair_ids, down).view(num_tokens, top_k, -1)
        out = (outputs * routing.weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that compute the activation."""
        self.ops = ops

    def weight_slots(
        self, prefix: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
    ) -> Iterator[WeightSlot]:
        """Yield the slots of `{prefix}{expert}.{projection}.weight` and `.bias`, for each expert and projection."""
        self._unpack()
        inner = self._inner
        size = inner.length
        for expert in range(self.num_experts):
            for name, layer, bias, rows, shards in (
                (gate, self.gate_up, self.gate_up.bias, slice(0, size), cuts(inner)),
                (up, self.gate_up, self.gate_up.bias, slice(size, 2 * size), cuts(inner)),
                (down, self.down, self._down_bias(), slice(None), cuts(None, inner)),
            ):
                yield WeightSlot(f"{prefix}{expert}.{name}.weight", layer.weight[expert, rows], shards=shards)
                if bias is not None:
                    cut = shards if layer is self.gate_up else ()
                    yield WeightSlot(f"{prefix}{expert}.{name}.bias", bias[expert, rows], shards=cut)

    def stacked_slots(self, prefix: str, *, transposed: bool) -> Iterator[WeightSlot]:
        """Yield the slots of `{prefix}gate_up_proj`, `down_proj` and their `_bias`: one tensor for all experts.

        Args:
            prefix: prefix of the names.
            transposed: whether the tensors are [E, D, 2 I] and [E, I, D], instead of [E, 2 I, D] and [E, D, I].
        """
        self._unpack()
        gates = self._inner.times(2)  # gates and what they multiply alternate in these checkpoints
        for name, layer, bias, shards in (
            ("gate_up_proj", self.gate_up, self.gate_up.bias, (gates, None)),
            ("down_proj", self.down, self._down_bias(), (None, self._inner)),
        ):
            rows, columns = shards
            weight = layer.weight.transpose(1, 2) if transposed else layer.weight
            cut = cuts(None, columns, rows) if transposed else cuts(None, rows, columns)
            yield WeightSlot(f"{prefix}{name}", weight, shards=cut)
            if bias is not None:
                yield WeightSlot(f"{prefix}{name}_bias", bias, shards=cuts(None, rows))

    def _activate(self, gate_up: Tensor) -> Tensor:
        return self.ops.act_and_mul(gate_up, self._act) if isinstance(self._act, str) else self._act(gate_up)

    def _down_bias(self) -> Tensor | None:
        """Return the biases of the down projections; without memory on ranks that do not add them."""
        if self._has_bias and self.down.bias is None:
            return torch.empty(self.num_experts, self.down.out_features, device="meta")
        return self.down.bias

    def _unpack(self) -> None:
        self.gate_up.unpack()
        self.down.unpack()


class MoE(nn.Module):
    """A router and its experts.

    Args:
        router: the router, which chooses the experts of each token.
        experts: the experts; their number must equal the router's number of experts.
    """

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        out: Tensor = self.experts(x, self.router(x))
        return out


def routes_tokens(model: nn.Module) -> bool:
    """Return whether a model has experts, so that each step may use other weights."""
    return any(isinstance(module, Experts) for module in model.modules())
