"""The linear layer, which has one matrix for one or several projections of a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from graftlm.contracts import LinearKernel, LinearLayer, Quantization, Shard
from graftlm.layers.activation import activation
from graftlm.layers.grouped_linear import GroupedLinear
from graftlm.layers.ops import LayerOps, TorchOps
from graftlm.layers.packing import PackedGates, PackedMatrix, linear
from graftlm.layers.weights import WeightSlot, cuts, empty_parameter

__all__ = ["GatedLinear", "Linear", "OutputDelta", "as_shard", "pack_linears"]


class OutputDelta(Protocol):
    """The term that adapters add to a linear layer's output."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Return `out` [T, out_features] plus the adapters' term for the input x [T, in]; may change `out` in place."""
        ...


class Linear(nn.Module):
    """Projections of the same input, computed as one matrix product.

    Several ranks can split a layer. If the output sizes are shards, a rank computes its part of each output. If the
    input size is a shard, a rank's input is this part, and the outputs of all ranks are added up.

    Args:
        in_features: size of the input.
        parts: name of each projection in the checkpoint -> its output size, in the order of the output. For example,
            `{"q_proj": 64, "k_proj": 16, "v_proj": 16}` has outputs of size 96.
        bias: whether each projection has a bias.
        device, dtype: device and dtype of the parameters.

    Attributes:
        in_features, out_features: sizes of the rank's matrix.

    A layer with a prefix in the checkpoint can have adapters, and must be called with one row per token of the batch,
    in the batch's order. A layer without a prefix, such as `lm_head`, may be called with any rows.
    """

    def __init__(
        self,
        in_features: int | Shard,
        parts: Mapping[str, int | Shard],
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._input = as_shard(in_features)
        self._outputs = {name: as_shard(size) for name, size in parts.items()}
        self._parts = {name: shard.length for name, shard in self._outputs.items()}
        self._has_bias = bias
        self._quantization: Quantization | None = None
        self._kernel: LinearKernel | None = None
        self._packed: PackedMatrix | None = None
        self._delta: OutputDelta | None = None
        self._prefix: str | None = None
        self.ops: LayerOps = TorchOps()
        self._communicator = self._input.communicator
        self.in_features = self._input.length
        self.out_features = out_features = sum(self._parts.values())
        self.weight = empty_parameter(out_features, self.in_features, device=device, dtype=dtype)
        adds_bias = bias and (self._input.is_whole or self._input.parallel.rank == 0)  # only one rank adds the bias
        self.bias = empty_parameter(out_features, device=device, dtype=dtype) if adds_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., sum of the parts]."""
        out = linear(x, self.weight, self._packed, self.bias) if self._kernel is None else self._kernel(x)
        if self._delta is not None:
            out = self._delta(x, out)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that pack the weights."""
        self.ops = ops

    def adapt(self, delta: OutputDelta | None) -> None:
        """Set the adapters' term that all later calls add to the output; None: no term."""
        self._delta = delta

    @property
    def parts(self) -> Mapping[str, int]:
        """The name in the checkpoint and the rank's output size of each projection, in the order of the output."""
        return self._parts

    @property
    def inputs(self) -> Shard:
        """The rank's part of the input."""
        return self._input

    @property
    def outputs(self) -> Mapping[str, Shard]:
        """The name in the checkpoint of each projection, and the rank's part of its output."""
        return self._outputs

    @property
    def prefix(self) -> str | None:
        """The prefix of the projections' names in the checkpoint; None before weights have been loaded."""
        return self._prefix

    @property
    def kernel(self) -> LinearKernel | None:
        """The quantized matrix; None while weights are not quantized."""
        return self._kernel

    @property
    def kernels(self) -> list[LinearKernel]:
        """A list with the quantized matrix, as in a `GroupedLinear`; empty while weights are not quantized."""
        return [] if self._kernel is None else [self._kernel]

    @property
    def num_weights(self) -> int:
        """Number of elements of the weight, quantized or not."""
        return self.out_features * self.in_features

    def describe(self, name: str) -> LinearLayer:
        """Return the description of the layer for a quantization; `name` is the layer's path in the model."""
        return LinearLayer(name, tuple(self._parts), self.in_features, self.out_features)

    def quantize_with(self, quantization: Quantization | None) -> None:
        """Set the quantization that converts the weights after each loading; None: weights are not quantized."""
        self._quantization = quantization

    def pack(self) -> None:
        """Quantize the loaded weights, or pack them for this CPU. Loading weights again reverses this."""
        if self._kernel is not None or self._packed is not None:
            return
        if self._quantization is not None:
            self._kernel = self._quantization.convert(self.weight, self.bias)
        else:
            self._packed = self._pack_weight()
            if self._packed is None:
                return
        self.weight = self._empty_weight(num_rows=0)  # frees the plain weight before the next layer is packed

    def discard(self) -> None:
        """Free the packed or quantized weights; the plain weights are then uninitialised until the next loading."""
        if self._packed is None and self._kernel is None:
            return
        self._packed = self._kernel = None
        self.weight = self._empty_weight(self.out_features)

    def _pack_weight(self) -> PackedMatrix | None:
        return self.ops.pack(self.weight)

    def _empty_weight(self, num_rows: int) -> nn.Parameter:
        return empty_parameter(num_rows, self.in_features, device=self.weight.device, dtype=self.weight.dtype)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of `{prefix}{part}.weight` and `.bias`.

        Effects: restores the plain weights if they were packed; leaves them uninitialised if they were quantized.
        """
        if self._packed is not None:
            self.weight = nn.Parameter(self._packed.plain(), requires_grad=False)
            self._packed = None
        elif self._kernel is not None:
            self.weight = self._empty_weight(self.out_features)
            self._kernel = None
        self._prefix = prefix
        bias = self.bias if self.bias is not None else torch.empty(self.out_features, device="meta")
        start = 0
        for name, shard in self._outputs.items():
            used = slice(start, start + shard.num_used)
            yield WeightSlot(f"{prefix}{name}.weight", self.weight[used], shards=cuts(shard, self._input))
            if self._has_bias:
                yield WeightSlot(f"{prefix}{name}.bias", bias[used], shards=cuts(shard))
            start += shard.length
            self.weight.data[used.stop : start].zero_()  # padding


class GatedLinear(Linear):
    """The gated half of a feed-forward layer, act(gate(x)) * up(x), with gate and up in one matrix product.

    Args:
        in_features: size of the input.
        parts: name in the checkpoint -> output size, see `Linear`: gate and up, or one tensor with both.
        hidden_act: name of the activation in config.json.
        bias: whether each projection has a bias.
        device, dtype: device and dtype of the parameters.

    Raises:
        UnsupportedArchitectureError: there is no such activation.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int | Shard],
        hidden_act: str,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(in_features, parts, bias=bias, device=device, dtype=dtype)
        activation(hidden_act)  # raises now for an unknown name, not in the first step
        self._hidden_act = hidden_act
        self._packs_gates = False

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, in_features] to [T, half the sum of the parts]."""
        if self._packs_gates and self._packed is not None and self._delta is None:
            return cast(PackedGates, self._packed).act_and_mul(x, self.bias)
        return self.ops.act_and_mul(super().forward(x), self._hidden_act)

    def _pack_weight(self) -> PackedMatrix | None:
        gates = self.ops.pack_gates(self.weight, self._hidden_act)
        self._packs_gates = gates is not None
        return super()._pack_weight() if gates is None else gates


def as_shard(size: int | Shard) -> Shard:
    """Return a size as a shard; an integer is the size of a whole dimension."""
    return Shard.whole(size) if isinstance(size, int) else size


def pack_linears(model: nn.Module) -> None:
    """Quantize or pack the loaded weights of every linear layer of a model; see `Linear.pack`."""
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.pack()
