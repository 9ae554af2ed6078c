"""Granite 4 (IBM), hybrid: most layers are state spaces as in Mamba 2, some attend; each has a feed-forward layer."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor, nn

from graftlm.contracts import ForwardBatch, ModelConfig, ModelContext, StateBatch
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers import (
    Attention,
    DecoderLayer,
    DecoderModel,
    DecoderShape,
    Experts,
    GatedMLP,
    Linear,
    MoE,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    Router,
    WeightSlot,
    read_expert_counts,
    read_flag,
    read_number,
    read_size,
    required_state,
    rope_frequencies,
    routes_tokens,
    softmax_top_k,
)
from graftlm_models.mamba_mixer import MambaMixer, MambaShape, check_silu, read_time_step_limit

__all__ = ["GraniteMoeHybridForCausalLM"]

#: Names of the kinds of layers: those of Transformers, and those of the published checkpoints.
_STATE_LAYERS = ("linear_attention", "mamba")
_ATTENTION_LAYERS = ("full_attention", "attention")

#: Name of the stacked experts' tensors in `Experts.stacked_slots` -> name in the checkpoint.
_EXPERT_NAMES = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}


class GraniteMoeHybridForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, device, dtype = context.config, context.device, context.dtype
        raw, shape, mamba = config.raw, DecoderShape.from_config(config), _mamba_shape(config)
        attention_ids, state_ids = count(), count()
        layers = (
            GraniteLayer(
                shape,
                context,
                GraniteAttention(shape, context, next(attention_ids)) if attends else None,
                None if attends else MambaMixer(mamba, next(state_ids), device=device, dtype=dtype),
            )
            for attends in _attends(raw, shape.num_layers)
        )
        norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        super().__init__(shape, context, layers, norm)
        self._embedding_multiplier = read_number(raw, "embedding_multiplier", default=1.0)
        self._logits_scaling = read_number(raw, "logits_scaling", default=1.0)
        self.rotary: RotaryEmbedding | None = None
        if raw.get("position_embedding_type") == "rope":
            rope = rope_frequencies(config, shape.head_dim, context_len=context.context_len)
            self.rotary = RotaryEmbedding(rope, device=device, dtype=dtype)

    @property
    def repeats_calls(self) -> bool:
        """True if the model has no experts."""
        return not routes_tokens(self)

    @property
    def selects_tokens(self) -> bool:
        """Always true: the last layer's feed-forward runs only for the tokens of `wanted_idx`."""
        return True

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden] or [W, hidden]; see the contract."""
        state = required_state(batch.state)
        rotation = None if self.rotary is None else self.rotary(batch.positions)
        x, residual = self.embed_tokens(batch.input_ids), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, rotation, state)
        x, residual = self.layers[-1](x, residual, rotation, state, batch.wanted_idx)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the scaled embeddings of tokens; see `Model`."""
        return super().embed_tokens(token_ids) * self._embedding_multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V], in the parameters' dtype."""
        return super().logits(hidden) / self._logits_scaling


class GraniteLayer(DecoderLayer):
    """A decoder layer: attention or state space, then feed-forward, each after a norm, scaled and added."""

    def __init__(
        self,
        shape: DecoderShape,
        context: ModelContext,
        attention: "GraniteAttention | None",
        mamba: MambaMixer | None,
    ) -> None:
        super().__init__()
        raw, device, dtype = context.config.raw, context.device, context.dtype
        self._multiplier = read_number(raw, "residual_multiplier", default=1.0)
        self.input_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.attention = attention
        self.mamba = mamba
        self.post_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.moe = _experts(shape, context) if raw.get("num_local_experts") else None
        self.shared = GatedMLP(
            shape.hidden_size,
            read_size(raw, "shared_intermediate_size", default=1024),
            shape.hidden_act,
            gate_up=("input_linear",),
            down="output_linear",
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation | None,
        state: StateBatch,
        wanted_idx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return this layer's addition to the residual stream, and the stream without it; both [T, hidden].

        Args:
            wanted_idx: the tokens to return, int64 [W]; None: all.
        """
        x, residual = self.input_norm(x, residual)
        if self.attention is not None:
            x = self.attention(x, rotation, wanted_idx)
        elif self.mamba is not None:
            x = self.mamba(x, state, wanted_idx)
        if wanted_idx is not None:
            residual = residual.index_select(0, wanted_idx)
        x, residual = self.post_norm(x * self._multiplier, residual)
        out = self.shared(x) if self.moe is None else self.moe(x) + self.shared(x)
        return out * self._multiplier, residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.input_norm.weight_slots(prefix, "input_layernorm")
        if self.attention is not None:
            yield from self.attention.weight_slots(f"{prefix}self_attn.")
        if self.mamba is not None:
            yield from self.mamba.weight_slots(f"{prefix}mamba.")
        yield from self.post_norm.weight_slots(prefix, "post_attention_layernorm")
        if self.moe is not None:
            yield from self.moe.router.weight_slots(f"{prefix}block_sparse_moe.", "router.layer")
            for slot in self.moe.experts.stacked_slots("", transposed=False):
                yield replace(slot, name=f"{prefix}block_sparse_moe.{_EXPERT_NAMES[slot.name]}")
        yield from self.shared.weight_slots(f"{prefix}shared_mlp.")


class GraniteAttention(nn.Module):
    """Attention with projections; most checkpoints have no rotation."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        self._shape = shape
        raw, device, dtype = context.config.raw, context.device, context.dtype
        bias = read_flag(raw, "attention_bias")
        sizes = {"q_proj": shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
        self.qkv = Linear(shape.hidden_size, sizes, bias=bias, device=device, dtype=dtype)
        self.out = Linear(shape.q_size, {"o_proj": shape.hidden_size}, bias=bias, device=device, dtype=dtype)
        scale = read_number(raw, "attention_multiplier", default=1.0)
        self.attend = Attention(shape.attention_layer(layer_id, scale=scale))

    def forward(self, x: Tensor, rotation: Rotation | None, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        shape = self._shape
        qkv = self.qkv(x).view(x.shape[0], -1, shape.head_dim)  # [T, H + 2 H_kv, D]
        qk, v = qkv.split_with_sizes((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        qk = qk if rotation is None else rotation(qk)
        q, k = qk.split_with_sizes((shape.num_heads, shape.num_kv_heads), dim=1)
        mixed = self.attend(q, k, v)
        out: Tensor = self.out(mixed if wanted_idx is None else mixed.index_select(0, wanted_idx))
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.out.weight_slots(prefix)


def _experts(shape: DecoderShape, context: ModelContext) -> MoE:
    device, dtype = context.device, context.dtype
    num_experts, top_k = read_expert_counts(context.config.raw)
    choose = softmax_top_k(top_k, renormalise=True)
    return MoE(
        Router(shape.hidden_size, num_experts, choose, device=device, dtype=dtype),
        Experts(num_experts, shape.hidden_size, shape.intermediate_size, shape.hidden_act, device=device, dtype=dtype),
    )


def _mamba_shape(config: ModelConfig) -> MambaShape:
    """Read the sizes of the state spaces.

    Raises:
        CheckpointError: a size is missing or wrong.
        UnsupportedArchitectureError: the activation is not SiLU, or the positions are of an unknown kind.
    """
    raw = config.raw
    check_silu(raw)
    if raw.get("position_embedding_type") not in (None, "rope", "nope"):
        raise UnsupportedArchitectureError(
            f"config.json has position_embedding_type {raw['position_embedding_type']!r}; expected rope, nope or null"
        )
    hidden_size, num_heads = read_size(raw, "hidden_size"), read_size(raw, "mamba_n_heads", default=128)
    inner_size = read_size(raw, "mamba_expand", default=2) * hidden_size
    head_dim = raw.get("mamba_d_head")
    return MambaShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=inner_size // num_heads if head_dim in (None, "auto") else read_size(raw, "mamba_d_head"),
        state_size=read_size(raw, "mamba_d_state", default=256),
        num_groups=read_size(raw, "mamba_n_groups", default=1),
        kernel_size=read_size(raw, "mamba_d_conv", default=4),
        conv_bias=read_flag(raw, "mamba_conv_bias", default=True),
        proj_bias=read_flag(raw, "mamba_proj_bias"),
        eps=read_number(raw, "rms_norm_eps", default=1e-6),
        time_step_limit=read_time_step_limit(raw),
    )


def _attends(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return for each layer whether it is an attention layer and no state space.

    Raises:
        CheckpointError: `layer_types` has another length or other entries.
    """
    types = raw.get("layer_types") or raw.get("layers_block_type")
    if types is None:
        return [False] * num_layers
    if len(types) != num_layers or not set(types) <= {*_STATE_LAYERS, *_ATTENTION_LAYERS}:
        raise CheckpointError(
            f"config.json needs layer_types as {num_layers} of {', '.join((*_STATE_LAYERS, *_ATTENTION_LAYERS))}, "
            f"got {types!r}"
        )
    return [kind in _ATTENTION_LAYERS for kind in types]
