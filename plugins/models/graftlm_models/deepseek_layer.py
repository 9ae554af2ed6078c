"""The layers of DeepSeek V2 and V3: latent attention, and routed and shared experts.

A token's keys and values of all heads are products of one small latent vector. The cache stores this vector, and the
rotated part of the key, which all heads share:

    cached    [ latent c, R numbers | rotated key, P numbers ]      576 numbers instead of 5,120 for 16 heads
    key h     [ W_k[h] c            | rotated key ]
    value h     W_v[h] c

Keys and values are never computed. Because q . (W_k c) = (W_k^T q) . c, queries are mapped into the latent space. All
heads attend over a single key/value head, whose value is the first R numbers of its key. W_v maps the result to values.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.contracts import (
    AttentionLayer,
    ModelConfig,
    ModelContext,
    Shard,
)
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers import (
    Attention,
    DecoderLayer,
    DecoderShape,
    Experts,
    GatedMLP,
    Linear,
    MoE,
    RMSNorm,
    Rotation,
    Router,
    WeightSlot,
    cuts,
    empty_parameter,
    read_flag,
    read_number,
    read_size,
)
from graftlm_models.deepseek_routing import read_v2_choice, read_v3_choice

__all__ = ["DeepseekLayer", "LatentShape", "read_count"]

#: Epsilon of the norms of latent vectors. The epsilon in config.json applies to the other norms.
_LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of latent attention.

    Attributes:
        rank: R, size of a latent vector.
        rope_dim: P, size of the rotated part of a query and of the shared key.
        nope_dim: size of the part of a head's query that is not rotated.
        value_dim: size of a head's value.
        q_rank: size of the queries' latent vector; None: queries are projected directly from the hidden state.
        scale: factor of the attention scores.
        interleaved: whether the checkpoint stores rotated numbers in pairs instead of halves.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None
    scale: float
    interleaved: bool

    @classmethod
    def from_config(cls, config: ModelConfig) -> "LatentShape":
        """Read config.json.

        Raises:
            CheckpointError: a size is missing.
        """
        raw = config.raw
        rope_dim, nope_dim = read_size(raw, "qk_rope_head_dim"), read_size(raw, "qk_nope_head_dim")
        return cls(
            rank=read_size(raw, "kv_lora_rank"),
            rope_dim=rope_dim,
            nope_dim=nope_dim,
            value_dim=read_size(raw, "v_head_dim"),
            q_rank=None if raw.get("q_lora_rank") is None else read_size(raw, "q_lora_rank"),
            scale=(rope_dim + nope_dim) ** -0.5 * _yarn_scale(raw),
            interleaved=read_flag(raw, "rope_interleave", default=True),
        )

    def attention_layer(self, layer_id: int, num_heads: int) -> AttentionLayer:
        """Describe one layer's attention to the backend."""
        return AttentionLayer(
            layer_id=layer_id,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=self.rank + self.rope_dim,
            scale=self.scale,
            value_prefix_dim=self.rank,
        )


class DeepseekLayer(DecoderLayer):
    """A decoder layer like Llama's. The first layers have a dense feed-forward, later layers have experts."""

    def __init__(self, shape: DecoderShape, latent: LatentShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        device, dtype, raw = context.device, context.dtype, context.config.raw
        self.input_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.attention = LatentAttention(shape, latent, context, layer_id)
        self.post_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mlp: GatedMLP | DeepseekMoE
        if layer_id < read_count(raw, "first_k_dense_replace", default=3 if _is_v3(context.config) else 0):
            self.mlp = _dense(shape, context, shape.intermediate)
        else:
            self.mlp = DeepseekMoE(shape, context)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, wanted_idx: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return this layer's addition to the residual stream, and the stream without it; both [T, hidden].

        Args:
            wanted_idx: the tokens to return, int64 [W]; None: all.
        """
        x, residual = self.input_norm(x, residual)
        x = self.attention(x, rotation, wanted_idx)
        if wanted_idx is not None:
            residual = residual.index_select(0, wanted_idx)
        x, residual = self.post_norm(x, residual)
        return self.mlp(x), residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.input_norm.weight_slots(prefix, "input_layernorm")
        yield from self.attention.weight_slots(f"{prefix}self_attn.")
        yield from self.post_norm.weight_slots(prefix, "post_attention_layernorm")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")


class LatentAttention(nn.Module):
    """Attention with projections into and out of the latent space."""

    def __init__(self, shape: DecoderShape, latent: LatentShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        device, dtype, heads = context.device, context.dtype, shape.num_heads
        bias = read_flag(context.config.raw, "attention_bias")
        if bias and latent.q_rank is None:
            raise UnsupportedArchitectureError("config.json has attention_bias true with a null q_lora_rank")
        self._latent, self._num_heads = latent, heads
        num_all = shape.q.size // shape.head_dim
        q_size = context.parallel.heads(num_all, latent.nope_dim + latent.rope_dim)
        down: dict[str, int | Shard] = {"kv_a_proj_with_mqa": latent.rank + latent.rope_dim}
        down |= {"q_proj": q_size} if latent.q_rank is None else {"q_a_proj": latent.q_rank}
        self.down = Linear(shape.hidden_size, down, bias=bias, device=device, dtype=dtype)
        self.kv_norm = RMSNorm(latent.rank, _LATENT_EPS, device=device, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        self.q_up: Linear | None = None
        if latent.q_rank is not None:
            self.q_norm = RMSNorm(latent.q_rank, _LATENT_EPS, device=device, dtype=dtype)
            self.q_up = Linear(latent.q_rank, {"q_b_proj": q_size}, device=device, dtype=dtype)
        # W_k and W_v of each head, [H, nope_dim + value_dim, R]; they are one tensor in the checkpoint.
        self.kv_up = empty_parameter(heads, latent.nope_dim + latent.value_dim, latent.rank, device=device, dtype=dtype)
        self._kv_rows = context.parallel.heads(num_all, latent.nope_dim + latent.value_dim)
        values = context.parallel.heads(num_all, latent.value_dim)
        self.out = Linear(values, {"o_proj": shape.hidden_size}, bias=bias, device=device, dtype=dtype)
        self.attend = Attention(latent.attention_layer(layer_id, heads))

    def forward(self, x: Tensor, rotation: Rotation, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        q, k = self._queries_and_keys(x, rotation)
        mixed = self.attend(q, k, k[..., : self._latent.rank])  # [T, H * R]
        if wanted_idx is not None:
            mixed = mixed.index_select(0, wanted_idx)
        out: Tensor = self.out(self._out_of_latent(mixed.unflatten(1, (self._num_heads, -1))))
        return out

    def keys_and_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return the keys [T, 1, R + P] and values [T, 1, R] of [T, hidden]."""
        k = self._queries_and_keys(x, rotation)[1]
        return k, k[..., : self._latent.rank]

    def _queries_and_keys(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return queries [T, H, R + P] and keys [T, 1, R + P]."""
        latent, num_tokens = self._latent, x.shape[0]
        c, k_rope, q = self.down(x).split_with_sizes(
            (latent.rank, latent.rope_dim, self.down.out_features - latent.rank - latent.rope_dim), dim=-1
        )
        c, _ = self.kv_norm(c.contiguous())
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q.contiguous())[0])
        q_nope, q_rope = q.view(num_tokens, self._num_heads, -1).split((latent.nope_dim, latent.rope_dim), dim=-1)
        rope = torch.cat([q_rope, k_rope.unsqueeze(1)], dim=1)  # [T, H + 1, P]
        rope = rotation(_pairs_to_halves(rope) if latent.interleaved else rope)
        q = torch.cat([self._into_latent(q_nope), rope[:, :-1]], dim=-1)  # [T, H, R + P]
        return q, torch.cat([c.unsqueeze(1), rope[:, -1:]], dim=-1)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.down.weight_slots(prefix)
        yield from self.kv_norm.weight_slots(prefix, "kv_a_layernorm")
        if self.q_norm is not None and self.q_up is not None:
            yield from self.q_norm.weight_slots(prefix, "q_a_layernorm")
            yield from self.q_up.weight_slots(prefix)
        yield WeightSlot(f"{prefix}kv_b_proj.weight", self.kv_up.flatten(0, 1), shards=cuts(self._kv_rows))
        yield from self.out.weight_slots(prefix)

    def _into_latent(self, q: Tensor) -> Tensor:
        """Map queries [T, H, nope_dim] to [T, H, R], each head with its own W_k."""
        return torch.bmm(q.transpose(0, 1), self.kv_up[:, : self._latent.nope_dim]).transpose(0, 1)

    def _out_of_latent(self, mixed: Tensor) -> Tensor:
        """Map attention outputs [T, H, R] to values [T, H * value_dim], each head with its own W_v."""
        values = torch.bmm(mixed.transpose(0, 1), self.kv_up[:, self._latent.nope_dim :].transpose(1, 2))
        return values.transpose(0, 1).flatten(1)


class DeepseekMoE(nn.Module):
    """A feed-forward layer of routed experts and a shared expert."""

    def __init__(self, shape: DecoderShape, context: ModelContext) -> None:
        super().__init__()
        raw, device, dtype = context.config.raw, context.device, context.dtype
        if raw.get("moe_layer_freq") not in (None, 1):
            raise UnsupportedArchitectureError(
                f"config.json has moe_layer_freq {raw['moe_layer_freq']!r}, but only 1 is supported"
            )
        num_experts = read_size(raw, "n_routed_experts")
        size = context.parallel.shard(read_size(raw, "moe_intermediate_size"), "moe_intermediate_size")
        self.correction: nn.Parameter | None = None
        if _is_v3(context.config):
            self.correction = empty_parameter(num_experts, device=device, dtype=torch.float32)
            choose = read_v3_choice(raw, num_experts, self.correction)
        else:
            choose = read_v2_choice(raw, num_experts)
        router = Router(shape.hidden_size, num_experts, choose, device=device, dtype=torch.float32)
        experts = Experts(num_experts, shape.hidden_size, size, shape.hidden_act, device=device, dtype=dtype)
        self.routed = MoE(router, experts)
        self.shared = _dense(shape, context, size.times(read_size(raw, "n_shared_experts")))

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        out: Tensor = self.routed(x) + self.shared(x)
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.routed.router.weight_slots(prefix, "gate")
        if self.correction is not None:
            yield WeightSlot(f"{prefix}gate.e_score_correction_bias", self.correction)
        yield from self.routed.experts.weight_slots(f"{prefix}experts.")
        yield from self.shared.weight_slots(f"{prefix}shared_experts.")


def _dense(shape: DecoderShape, context: ModelContext, intermediate_size: Shard) -> GatedMLP:
    return GatedMLP(
        shape.hidden_size,
        intermediate_size,
        shape.hidden_act,
        bias=read_flag(context.config.raw, "mlp_bias") and not _is_v3(context.config),  # V3 has no such entry
        device=context.device,
        dtype=context.dtype,
    )


def _pairs_to_halves(x: Tensor) -> Tensor:
    """Reorder [..., P] from x0 y0 x1 y1 ... to x0 x1 ... y0 y1 ...; queries and keys must both be reordered."""
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)


def _is_v3(config: ModelConfig) -> bool:
    return "DeepseekV3ForCausalLM" in config.architectures


def _yarn_scale(raw: Mapping[str, Any]) -> float:
    """Return the factor that `mscale_all_dim` sets for the scores if YaRN extends the context, otherwise 1."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(rope, Mapping) or not rope.get("mscale_all_dim"):
        return 1.0
    factor, mscale = read_number(rope, "factor", default=1.0), read_number(rope, "mscale_all_dim")
    is_plain = (rope.get("rope_type") or rope.get("type") or "default") == "default"
    return 1.0 if is_plain or factor <= 1 else (0.1 * mscale * math.log(factor) + 1.0) ** 2


def read_count(raw: Mapping[str, Any], name: str, default: int) -> int:
    """Read an integer of 0 or more; null counts as absent."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"config.json needs {name} as a whole number of 0 or more, got {value!r}")
    return value
