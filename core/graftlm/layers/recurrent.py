"""The layers with a recurrent state: its memory, the causal convolution, and the scans with a matrix per head."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from graftlm.contracts import StateBatch, StateLayer
from graftlm.errors import InvariantError
from graftlm.layers.state_ops import StateOps, TorchStateOps
from graftlm.layers.weights import WeightSlot, empty_parameter

__all__ = ["CausalConv", "GatedDeltaRule", "RecurrentState", "SSDScan", "required_state"]


class RecurrentState(nn.Module):
    """The state tensors of one layer; it has no parameters.

    Args:
        spec: the layer's tensors, for the engine that allocates them.
    """

    def __init__(self, spec: StateLayer) -> None:
        super().__init__()
        self.spec = spec
        self._tensors: tuple[Tensor, ...] | None = None

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Set the tensors, [slots, *shape] for each tensor of `spec`."""
        self._tensors = tuple(tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that were bound.

        Raises:
            InvariantError: no tensors were bound.
        """
        if self._tensors is None:
            raise InvariantError("A model's forward was called before bind_states(states)")
        return self._tensors


def required_state(state: StateBatch | None) -> StateBatch:
    """Return `ForwardBatch.state` of a model with state layers.

    Raises:
        InvariantError: the batch has no segments.
    """
    if state is None:
        raise InvariantError("the batch of a model with recurrent states has no segments")
    return state


class CausalConv(nn.Module):
    """A depthwise causal convolution: each output depends on the latest K inputs of the same channel.

        y[t] = act(bias + sum over k of weight[k] * x[t - K + 1 + k])

    The state contains the latest K - 1 inputs, [K - 1, C]. Sums are float32.

    Args:
        num_channels: C.
        kernel_size: K, at least 2.
        bias: whether there is a bias.
        silu: whether SiLU is applied to the sums.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
        self,
        num_channels: int,
        kernel_size: int,
        *,
        bias: bool = False,
        silu: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._silu = silu
        self._ops: StateOps = TorchStateOps()
        self.weight = empty_parameter(kernel_size, num_channels, device=device, dtype=dtype)
        self.bias = empty_parameter(num_channels, device=device, dtype=dtype) if bias else None

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of the state, (K - 1, C)."""
        kernel_size, num_channels = self.weight.shape
        return kernel_size - 1, num_channels

    def forward(self, x: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        """Convolve the segments of a step; return [T, C].

        Args:
            x: [T, C].
            state: [slots, K - 1, C] of x's dtype; the segments' targets are written.
        """
        return self._ops.causal_conv(x, self.weight, self.bias, state, batch, silu=self._silu)

    def use_state_ops(self, ops: StateOps) -> None:
        """Set the operations that convolve."""
        self._ops = ops

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of `{prefix}weight`, [C, 1, K], and `{prefix}bias`, [C]."""
        yield WeightSlot(f"{prefix}weight", self.weight.T[:, None])
        if self.bias is not None:
            yield WeightSlot(f"{prefix}bias", self.bias)


class SSDScan(nn.Module):
    """The scan of Mamba 2; it has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._ops: StateOps = TorchStateOps()

    def forward(self, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        """Compute the scan over the segments of a step; see `StateOps.ssd_scan`."""
        return self._ops.ssd_scan(x, log_decay, b, c, state, batch)

    def use_state_ops(self, ops: StateOps) -> None:
        """Set the operations that scan."""
        self._ops = ops


class GatedDeltaRule(nn.Module):
    """The gated delta rule; it has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._ops: StateOps = TorchStateOps()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
    ) -> Tensor:
        """Compute the rule over the segments of a step; see `StateOps.gated_delta_rule`."""
        return self._ops.gated_delta_rule(q, k, v, log_decay, beta, state, batch)

    def use_state_ops(self, ops: StateOps) -> None:
        """Set the operations that compute the rule."""
        self._ops = ops
