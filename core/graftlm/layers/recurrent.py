"""The memory of a layer's recurrent state, and the causal convolution, the simplest layer with such a state."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.contracts import StateBatch, StateLayer
from graftlm.errors import InvariantError
from graftlm.layers.weights import WeightSlot, empty_parameter

__all__ = ["CausalConv", "RecurrentState", "iter_chunks", "required_state"]


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
        self.weight = empty_parameter(kernel_size, num_channels, device=device, dtype=dtype)
        self.bias = empty_parameter(num_channels, device=device, dtype=dtype) if bias else None

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of the state, (K - 1, C)."""
        kernel_size, num_channels = self.weight.shape
        return kernel_size - 1, num_channels

    def forward(self, x: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        """Convolve the segments of a step.

        Args:
            x: [T, C].
            state: [slots, K - 1, C] of x's dtype; the segments' targets are written.

        Returns: [T, C].
        """
        segments = batch.segments
        num_decodes = segments.num_decodes
        out = torch.empty_like(x)
        if num_decodes:
            window = torch.cat((state[batch.sources[:num_decodes]], x[:num_decodes, None]), 1)
            out[:num_decodes] = self._sum(window)[:, 0]
            state.index_copy_(0, batch.targets[:num_decodes], window[:, 1:])
        for start, num_tokens, source, target in iter_chunks(batch):
            window = torch.cat((state[source], x[start : start + num_tokens]))
            out[start : start + num_tokens] = self._sum(window[None])[0]
            state[target] = window[num_tokens:]
        return out

    def _sum(self, window: Tensor) -> Tensor:
        """Return the outputs of consecutive inputs, [B, L, C]; `window` is [B, L + K - 1, C]."""
        kernel_size = len(self.weight)
        num_outputs = window.shape[1] - kernel_size + 1
        weight, window = self.weight.float(), window.float()
        total = window[:, :num_outputs] * weight[0]
        for k in range(1, kernel_size):
            total.addcmul_(window[:, k : k + num_outputs], weight[k])
        if self.bias is not None:
            total.add_(self.bias)
        return F.silu(total, inplace=True) if self._silu else total

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of `{prefix}weight`, [C, 1, K], and `{prefix}bias`, [C]."""
        yield WeightSlot(f"{prefix}weight", self.weight.T[:, None])
        if self.bias is not None:
            yield WeightSlot(f"{prefix}bias", self.bias)


def iter_chunks(batch: StateBatch) -> Iterator[tuple[int, int, int, int]]:
    """Yield start, number of tokens, source and target of each segment after the decode segments, in order."""
    segments = batch.segments
    columns = (segments.starts, segments.lens, segments.sources, segments.targets)
    yield from zip(*(column[segments.num_decodes :].tolist() for column in columns), strict=True)
