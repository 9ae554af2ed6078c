"""The mixer of Mamba 2 (arXiv:2405.21060), which hybrid models also have: convolution, scan and gated norm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.contracts import StateBatch, StateLayer, StateTensor
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers import CausalConv, GatedRMSNorm, Linear, RecurrentState, SSDScan, WeightSlot, empty_parameter

__all__ = ["MambaMixer", "MambaShape", "check_silu", "read_time_step_limit"]


@dataclass(frozen=True, slots=True)
class MambaShape:
    """The sizes of a mixer.

    Attributes:
        num_heads: H.
        head_dim: P, number of features of a head.
        state_size: N; a head's state is a matrix [P, N].
        num_groups: number of groups of heads; the heads of a group share b and c.
        kernel_size: number of tokens that the convolution reads.
        conv_bias, proj_bias: whether the convolution and the projections have a bias.
        eps: epsilon of the norm.
        time_step_limit: lower and upper limit of the step sizes.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel_size: int
    conv_bias: bool
    proj_bias: bool
    eps: float
    time_step_limit: tuple[float, float]

    def __post_init__(self) -> None:
        """Raise CheckpointError if the heads cannot be divided into groups."""
        if self.num_heads % self.num_groups:
            raise CheckpointError(
                f"config.json has {self.num_heads} heads of the state space in {self.num_groups} groups; the number of "
                "heads must be a multiple of the number of groups"
            )

    @property
    def inner_size(self) -> int:
        """Number of features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Number of features of b, or of c, in all groups."""
        return self.num_groups * self.state_size


class MambaMixer(nn.Module):
    """Maps hidden states to hidden states through a state space of fixed size.

    gate, x b c, dt = in_proj(hidden); out_proj(norm(scan(conv(x b c), dt) * silu(gate)))
    """

    def __init__(self, shape: MambaShape, layer_id: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._shape = shape
        inner, num_heads = shape.inner_size, shape.num_heads
        conv_size = inner + 2 * shape.group_size
        sizes = {"in_proj": inner + conv_size + num_heads}
        self.in_proj = Linear(shape.hidden_size, sizes, bias=shape.proj_bias, device=device, dtype=dtype)
        self.conv = CausalConv(
            conv_size, shape.kernel_size, bias=shape.conv_bias, silu=True, device=device, dtype=dtype
        )
        self.dt_bias, self.a_log, self.d = (
            empty_parameter(num_heads, device=device, dtype=torch.float32) for _ in range(3)
        )
        self.scan = SSDScan()
        self.norm = GatedRMSNorm(inner, shape.num_groups, shape.eps, gate_first=True, device=device, dtype=dtype)
        self.out = Linear(inner, {"out_proj": shape.hidden_size}, bias=shape.proj_bias, device=device, dtype=dtype)
        recurrent = (num_heads, shape.head_dim, shape.state_size)
        tensors = StateTensor("conv", self.conv.state_shape, dtype), StateTensor("recurrent", recurrent, torch.float32)
        self.state = RecurrentState(StateLayer(layer_id, tensors))

    def forward(self, x: Tensor, state: StateBatch, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        shape = self._shape
        inner, group = shape.inner_size, shape.group_size
        conv_memory, memory = self.state.tensors
        gate, mixed, dt = self.in_proj(x).split_with_sizes((inner, inner + 2 * group, shape.num_heads), dim=-1)
        mixed = self.conv(mixed, conv_memory, state).float()
        x, b, c = mixed.split_with_sizes((inner, group, group), dim=-1)
        x = x.view(-1, shape.num_heads, shape.head_dim)
        b, c = (part.view(-1, shape.num_groups, shape.state_size) for part in (b, c))
        step = F.softplus(dt.float() + self.dt_bias).clamp(*shape.time_step_limit)
        scanned = self.scan(x * step[..., None], -step * self.a_log.exp(), b, c, memory, state)
        scanned = torch.addcmul(scanned, x, self.d[:, None]).flatten(1)
        if wanted_idx is not None:
            scanned, gate = scanned.index_select(0, wanted_idx), gate.index_select(0, wanted_idx)
        out: Tensor = self.out(self.norm(scanned.to(gate.dtype), gate))
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.in_proj.weight_slots(prefix)
        yield from self.conv.weight_slots(f"{prefix}conv1d.")
        yield WeightSlot(f"{prefix}dt_bias", self.dt_bias)
        yield WeightSlot(f"{prefix}A_log", self.a_log)
        yield WeightSlot(f"{prefix}D", self.d)
        yield from self.norm.weight_slots(prefix, "norm")
        yield from self.out.weight_slots(prefix)


def read_time_step_limit(raw: Mapping[str, Any]) -> tuple[float, float]:
    """Read `time_step_limit`; null or absent means no limit.

    Raises:
        CheckpointError: the value is not two numbers.
    """
    limit = raw.get("time_step_limit") or (0.0, inf)
    try:
        low, high = map(float, map(_plain, limit))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json needs time_step_limit as two numbers, got {limit!r}") from error
    return low, high


def _plain(value: Any) -> Any:
    """Return a number of config.json; Transformers writes an infinite number as {"__float__": "Infinity"}."""
    return value.get("__float__") if isinstance(value, Mapping) else value


def check_silu(raw: Mapping[str, Any]) -> None:
    """Refuse other activations than SiLU.

    Raises:
        UnsupportedArchitectureError: config.json names another activation.
    """
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedArchitectureError(f"config.json has hidden_act {act!r}; the mixer of Mamba 2 supports silu")
