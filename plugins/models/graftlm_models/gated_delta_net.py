"""The gated delta network of Qwen3-Next and Qwen 3.5 (arXiv:2412.06464): convolution, gated delta rule, gated norm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.contracts import StateBatch, StateLayer, StateTensor
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers import (
    CausalConv,
    GatedDeltaRule,
    GatedRMSNorm,
    Linear,
    RecurrentState,
    WeightSlot,
    empty_parameter,
    read_size,
)

__all__ = ["GatedDeltaNet", "GatedDeltaShape"]

#: Number that is added to the sum of squares when queries and keys are normalised.
_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """The sizes of a gated delta network.

    Attributes:
        num_key_heads: G.
        num_value_heads: H, a multiple of G.
        key_dim, value_dim: D_k and D_v; a head's state is a matrix [D_k, D_v].
        kernel_size: number of tokens that the convolution reads.
        eps: epsilon of the norm.
        is_grouped: whether the checkpoint has the projections grouped by key head, as in Qwen3-Next.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    eps: float
    is_grouped: bool

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], eps: float, *, is_grouped: bool) -> Self:
        """Read config.json.

        Raises:
            CheckpointError: a size is missing, or the sizes are inconsistent.
            UnsupportedArchitectureError: the activation is not SiLU.
        """
        if raw.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedArchitectureError(
                f"config.json has hidden_act {raw['hidden_act']!r}; gated delta networks support silu"
            )
        num_key_heads = read_size(raw, "linear_num_key_heads", default=16)
        num_value_heads = read_size(raw, "linear_num_value_heads", default=32)
        if num_value_heads % num_key_heads:
            raise CheckpointError(
                f"config.json has linear_num_value_heads {num_value_heads} and linear_num_key_heads {num_key_heads}; "
                "the first must be a multiple of the second"
            )
        return cls(
            hidden_size=read_size(raw, "hidden_size"),
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=read_size(raw, "linear_key_head_dim", default=128),
            value_dim=read_size(raw, "linear_value_head_dim", default=128),
            kernel_size=read_size(raw, "linear_conv_kernel_dim", default=4),
            eps=eps,
            is_grouped=is_grouped,
        )

    @property
    def key_size(self) -> int:
        """Number of features of all query heads, or of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Number of features of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def projections(self) -> dict[str, int]:
        """Name in the checkpoint -> output size of each projection."""
        qkv, num_heads = 2 * self.key_size + self.value_size, self.num_value_heads
        if self.is_grouped:
            return {"in_proj_qkvz": qkv + self.value_size, "in_proj_ba": 2 * num_heads}
        return {"in_proj_qkv": qkv, "in_proj_z": self.value_size, "in_proj_b": num_heads, "in_proj_a": num_heads}


class GatedDeltaNet(nn.Module):
    """Maps hidden states to hidden states through a matrix of fixed size per head.

    q k v, z, b, a = projections(hidden); out_proj(norm(delta_rule(conv(q k v), b, a)) * silu(z))
    """

    def __init__(self, shape: GatedDeltaShape, layer_id: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._shape = shape
        num_heads = shape.num_value_heads
        conv_size = 2 * shape.key_size + shape.value_size
        self.in_proj = Linear(shape.hidden_size, shape.projections, device=device, dtype=dtype)
        self.conv = CausalConv(conv_size, shape.kernel_size, silu=True, device=device, dtype=dtype)
        self.dt_bias, self.a_log = (empty_parameter(num_heads, device=device, dtype=torch.float32) for _ in range(2))
        self.rule = GatedDeltaRule()
        self.norm = GatedRMSNorm(shape.value_dim, 1, shape.eps, gate_first=False, device=device, dtype=dtype)
        self.out = Linear(shape.value_size, {"out_proj": shape.hidden_size}, device=device, dtype=dtype)
        recurrent = (num_heads, shape.key_dim, shape.value_dim)
        tensors = StateTensor("conv", self.conv.state_shape, dtype), StateTensor("recurrent", recurrent, torch.float32)
        self.state = RecurrentState(StateLayer(layer_id, tensors))

    def forward(self, x: Tensor, state: StateBatch, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        shape = self._shape
        conv_memory, memory = self.state.tensors
        mixed, z, b, a = self._split(self.in_proj(x))
        mixed = self.conv(mixed, conv_memory, state).float()
        q, k, v = mixed.split_with_sizes((shape.key_size, shape.key_size, shape.value_size), dim=-1)
        q, k = (_normalise(part.view(-1, shape.num_key_heads, shape.key_dim)) for part in (q, k))
        v = v.view(-1, shape.num_value_heads, shape.value_dim)
        log_decay = -self.a_log.exp() * F.softplus(a.float() + self.dt_bias)
        mixed = self.rule(q * shape.key_dim**-0.5, k, v, log_decay, b.sigmoid().float(), memory, state)
        if wanted_idx is not None:
            mixed, z = mixed.index_select(0, wanted_idx), z.index_select(0, wanted_idx)
        out: Tensor = self.out(self.norm(mixed.to(z.dtype), z).flatten(1))
        return out

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v together, [T, 2 G D_k + H D_v]; z, [T, H, D_v]; b and a, [T, H]."""
        shape = self._shape
        num_groups, num_heads = shape.num_key_heads, shape.num_value_heads
        if not shape.is_grouped:
            sizes = (2 * shape.key_size + shape.value_size, shape.value_size, num_heads, num_heads)
            mixed, z, b, a = projected.split_with_sizes(sizes, dim=-1)
            return mixed, z.view(-1, num_heads, shape.value_dim), b, a
        per_group = num_heads // num_groups
        qkvz, ba = projected.split_with_sizes(list(shape.projections.values()), dim=-1)
        values = per_group * shape.value_dim
        parts = qkvz.view(len(qkvz), num_groups, -1).split_with_sizes(
            (shape.key_dim, shape.key_dim, values, values), dim=-1
        )
        mixed = torch.cat([part.flatten(1) for part in parts[:3]], dim=-1)
        b, a = (part.flatten(1) for part in ba.view(len(ba), num_groups, -1).chunk(2, dim=-1))
        return mixed, parts[3].reshape(-1, num_heads, shape.value_dim), b, a

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.in_proj.weight_slots(prefix)
        yield from self.conv.weight_slots(f"{prefix}conv1d.")
        yield WeightSlot(f"{prefix}dt_bias", self.dt_bias)
        yield WeightSlot(f"{prefix}A_log", self.a_log)
        yield from self.norm.weight_slots(prefix, "norm")
        yield from self.out.weight_slots(prefix)


def _normalise(heads: Tensor) -> Tensor:
    """Divide each head by its length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPS)
