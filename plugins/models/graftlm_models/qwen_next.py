"""Qwen3-Next and the text model of Qwen 3.5: gated delta networks, and gated attention in every fourth layer."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.contracts import ForwardBatch, ModelConfig, ModelContext, StateBatch
from graftlm.errors import CheckpointError
from graftlm.layers import (
    Attention,
    DecoderLayer,
    DecoderModel,
    DecoderShape,
    GatedMLP,
    GemmaQKNorm,
    GemmaRMSNorm,
    Linear,
    RotaryEmbedding,
    Rotation,
    WeightSlot,
    read_flag,
    read_size,
    required_state,
    rope_frequencies,
    routes_tokens,
)
from graftlm_models.gated_delta_net import GatedDeltaNet, GatedDeltaShape
from graftlm_models.qwen_moe import QwenMoE

__all__ = ["QwenNextForCausalLM"]

#: Prefix of the weights that predict several tokens; they are ignored.
_MULTI_TOKEN_PREFIX = "mtp."


class QwenNextForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        config = _with_rotated_share(context.config)
        context = replace(context, config=config)
        raw, device, dtype = config.raw, context.device, context.dtype
        shape = DecoderShape.from_config(config, head_dim=256)
        is_next = "Qwen3NextForCausalLM" in config.architectures
        delta = GatedDeltaShape.from_config(raw, shape.eps, is_grouped=is_next)
        attention_ids, state_ids = count(), count()
        layers = (
            QwenNextLayer(
                shape,
                context,
                QwenNextAttention(shape, context, next(attention_ids)) if attends else None,
                None if attends else GatedDeltaNet(delta, next(state_ids), device=device, dtype=dtype),
                has_experts=bool(raw.get("num_experts")) and QwenMoE.replaces_mlp(raw, i),
            )
            for i, attends in enumerate(_attends(raw, shape.num_layers))
        )
        super().__init__(shape, context, layers, GemmaRMSNorm(shape.hidden_size, shape.eps, device=device))
        rope = rope_frequencies(config, shape.head_dim, partial=True, context_len=context.context_len)
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
        state, rotation = required_state(batch.state), self.rotary(batch.positions)
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, rotation, state)
        x, residual = self.layers[-1](x, residual, rotation, state, batch.wanted_idx)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Drop the weights that predict several tokens."""
        return ((name, tensor) for name, tensor in weights if not name.startswith(_MULTI_TOKEN_PREFIX))


class QwenNextLayer(DecoderLayer):
    """A decoder layer: delta network or attention, then feed-forward, each after a norm and added to the stream."""

    def __init__(
        self,
        shape: DecoderShape,
        context: ModelContext,
        attention: "QwenNextAttention | None",
        delta: GatedDeltaNet | None,
        *,
        has_experts: bool,
    ) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.input_norm = GemmaRMSNorm(shape.hidden_size, shape.eps, device=device)
        self.attention = attention
        self.delta = delta
        self.post_norm = GemmaRMSNorm(shape.hidden_size, shape.eps, device=device)
        self.mlp = (
            QwenMoE(shape, context, has_shared_expert=True)
            if has_experts
            else GatedMLP(shape.hidden_size, shape.intermediate_size, shape.hidden_act, device=device, dtype=dtype)
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
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
        elif self.delta is not None:
            x = self.delta(x, state, wanted_idx)
        if wanted_idx is not None:
            residual = residual.index_select(0, wanted_idx)
        x, residual = self.post_norm(x, residual)
        return self.mlp(x), residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.input_norm.weight_slots(prefix, "input_layernorm")
        if self.attention is not None:
            yield from self.attention.weight_slots(f"{prefix}self_attn.")
        if self.delta is not None:
            yield from self.delta.weight_slots(f"{prefix}linear_attn.")
        yield from self.post_norm.weight_slots(prefix, "post_attention_layernorm")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")


class QwenNextAttention(nn.Module):
    """Attention with head norms, rotation of a part of each head, and a gate on its output."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        bias = read_flag(context.config.raw, "attention_bias")
        sizes = {"q_proj": 2 * shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
        self.qkv = Linear(shape.hidden_size, sizes, bias=bias, device=device, dtype=dtype)
        self.qk_norm = GemmaQKNorm(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.eps, device=device)
        self.out = Linear(shape.q_size, {"o_proj": shape.hidden_size}, bias=bias, device=device, dtype=dtype)
        self.attend = Attention(shape.attention_layer(layer_id))

    def forward(self, x: Tensor, rotation: Rotation, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        shape = self._shape
        q_gate, k, v = self.qkv(x).split_with_sizes((2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
        q, gate = q_gate.view(-1, shape.num_heads, 2, shape.head_dim).unbind(2)  # [T, H, D]
        k, v = (part.view(-1, shape.num_kv_heads, shape.head_dim) for part in (k, v))
        qk = rotation(self.qk_norm(torch.cat((q, k), dim=1)))
        q, k = qk.split_with_sizes((shape.num_heads, shape.num_kv_heads), dim=1)
        mixed = self.attend(q, k, v)
        if wanted_idx is not None:
            mixed, gate = mixed.index_select(0, wanted_idx), gate.index_select(0, wanted_idx)
        out: Tensor = self.out(mixed * gate.flatten(1).sigmoid())
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.qk_norm.weight_slots(prefix)
        yield from self.out.weight_slots(prefix)


def _with_rotated_share(config: ModelConfig) -> ModelConfig:
    """Return the configuration with `partial_rotary_factor`, which is a quarter if config.json has none."""
    rope = config.raw.get("rope_parameters")
    if "partial_rotary_factor" in config.raw or (isinstance(rope, Mapping) and "partial_rotary_factor" in rope):
        return config
    return replace(config, raw={**config.raw, "partial_rotary_factor": 0.25})


def _attends(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return for each layer whether it is an attention layer and no delta network.

    Raises:
        CheckpointError: `layer_types` has another length or other entries.
    """
    types = raw.get("layer_types")
    if types is None:
        interval = read_size(raw, "full_attention_interval", default=4)
        return [(layer + 1) % interval == 0 for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"full_attention", "linear_attention"}:
        raise CheckpointError(
            f"config.json needs layer_types as {num_layers} of full_attention or linear_attention, got {types!r}"
        )
    return [kind == "full_attention" for kind in types]
