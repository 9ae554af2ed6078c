"""LFM2 (Liquid AI): short convolutions with input-dependent gates, and attention in some of the layers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor, nn

from graftlm.contracts import ForwardBatch, ModelConfig, ModelContext, StateBatch, StateLayer, StateTensor
from graftlm.errors import CheckpointError
from graftlm.layers import (
    Attention,
    CausalConv,
    DecoderLayer,
    DecoderModel,
    DecoderShape,
    GatedMLP,
    Linear,
    QKNorm,
    RecurrentState,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    WeightSlot,
    read_flag,
    read_number,
    read_size,
    required_state,
    rope_frequencies,
)

__all__ = ["Lfm2ForCausalLM"]


class Lfm2ForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        config = _with_usual_names(context.config)
        context = replace(context, config=config)
        shape, device, dtype = DecoderShape.from_config(config, tied=True), context.device, context.dtype
        attention_ids, state_ids = count(), count()
        layers = (
            Lfm2Layer(
                shape,
                context,
                Lfm2Attention(shape, context, next(attention_ids))
                if attends
                else Lfm2Convolution(shape, context, next(state_ids)),
            )
            for attends in _attends(config.raw, shape.num_layers)
        )
        norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        super().__init__(shape, context, layers, norm, norm_name="embedding_norm")
        rope = rope_frequencies(config, shape.head_dim, context_len=context.context_len)
        self.rotary = RotaryEmbedding(rope, device=device, dtype=dtype)

    @property
    def repeats_calls(self) -> bool:
        """Always true."""
        return True

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


class Lfm2Layer(DecoderLayer):
    """A decoder layer: convolution or attention, then feed-forward, each after a norm and added to the stream."""

    def __init__(self, shape: DecoderShape, context: ModelContext, mixer: "Lfm2Attention | Lfm2Convolution") -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.mixer_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(
            shape.hidden_size,
            shape.intermediate_size,
            shape.hidden_act,
            gate_up=("w1", "w3"),
            down="w2",
            device=device,
            dtype=dtype,
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
        x, residual = self.mixer_norm(x, residual)
        x = self.mixer(x, rotation, state, wanted_idx)
        if wanted_idx is not None:
            residual = residual.index_select(0, wanted_idx)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.mixer_norm.weight_slots(prefix, "operator_norm")
        yield from self.mixer.weight_slots(prefix)
        yield from self.mlp_norm.weight_slots(prefix, "ffn_norm")
        yield from self.mlp.weight_slots(f"{prefix}feed_forward.")


class Lfm2Convolution(nn.Module):
    """A causal convolution of gated inputs, whose outputs are gated too.

    B, C, x = in_proj(hidden); out_proj(C * conv(B * x))
    """

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        device, dtype, raw = context.device, context.dtype, context.config.raw
        size = shape.hidden_size
        bias, kernel_size = read_flag(raw, "conv_bias"), read_size(raw, "conv_L_cache", default=3)
        self.in_proj = Linear(size, {"in_proj": 3 * size}, bias=bias, device=device, dtype=dtype)
        self.conv = CausalConv(size, kernel_size, bias=bias, device=device, dtype=dtype)
        self.out = Linear(size, {"out_proj": size}, bias=bias, device=device, dtype=dtype)
        self.state = RecurrentState(StateLayer(layer_id, (StateTensor("conv", self.conv.state_shape, dtype),)))

    def forward(self, x: Tensor, rotation: Rotation, state: StateBatch, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        gate_in, gate_out, x = self.in_proj(x).chunk(3, dim=-1)
        (memory,) = self.state.tensors
        mixed = gate_out * self.conv(gate_in * x, memory, state)
        out: Tensor = self.out(mixed if wanted_idx is None else mixed.index_select(0, wanted_idx))
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}conv...` tensors."""
        yield from self.in_proj.weight_slots(f"{prefix}conv.")
        yield from self.conv.weight_slots(f"{prefix}conv.conv.")
        yield from self.out.weight_slots(f"{prefix}conv.")


class Lfm2Attention(nn.Module):
    """Attention with projections, head norms and rotation."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        sizes = {"q_proj": shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
        self.qkv = Linear(shape.hidden_size, sizes, device=device, dtype=dtype)
        self.qk_norm = QKNorm(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.eps,
            names=("q_layernorm", "k_layernorm"),
            device=device,
            dtype=dtype,
        )
        self.out = Linear(shape.q_size, {"out_proj": shape.hidden_size}, device=device, dtype=dtype)
        self.attend = Attention(shape.attention_layer(layer_id))

    def forward(self, x: Tensor, rotation: Rotation, state: StateBatch, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        shape = self._shape
        qkv = self.qkv(x).view(x.shape[0], -1, shape.head_dim)  # [T, H + 2 H_kv, D]
        qk, v = qkv.split_with_sizes((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        q, k = rotation(self.qk_norm(qk)).split_with_sizes((shape.num_heads, shape.num_kv_heads), dim=1)
        mixed = self.attend(q, k, v)
        out: Tensor = self.out(mixed if wanted_idx is None else mixed.index_select(0, wanted_idx))
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}self_attn...` tensors."""
        yield from self.qkv.weight_slots(f"{prefix}self_attn.")
        yield from self.qk_norm.weight_slots(f"{prefix}self_attn.")
        yield from self.out.weight_slots(f"{prefix}self_attn.")


def _with_usual_names(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the names of Llama, and with the size that the feed-forward layers really have."""
    raw = dict(config.raw)
    raw["rms_norm_eps"] = raw.get("norm_eps", 1e-5)
    if "tie_embedding" in raw:
        raw["tie_word_embeddings"] = raw["tie_embedding"]
    if "block_ff_dim" in raw:
        raw["intermediate_size"] = raw["block_ff_dim"]
    if read_flag(raw, "block_auto_adjust_ff_dim", default=True):
        raw["intermediate_size"] = _adjusted_size(raw)
    return replace(config, raw=raw)


def _adjusted_size(raw: Mapping[str, Any]) -> int:
    """Return two thirds of the configured size, multiplied and rounded up as config.json says."""
    size = 2 * read_size(raw, "intermediate_size") // 3
    if raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    size = int(read_number(raw, "block_ffn_dim_multiplier", default=1.0) * size)
    multiple = read_size(raw, "block_multiple_of", default=256)
    return -(-size // multiple) * multiple


def _attends(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return for each layer whether it is an attention layer and no convolution.

    Raises:
        CheckpointError: `layer_types` has another length or other entries.
    """
    types, indices = raw.get("layer_types"), raw.get("full_attn_idxs")
    if types is None:
        return [indices is None or layer in indices for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"full_attention", "conv"}:
        raise CheckpointError(f"config.json needs layer_types as {num_layers} of full_attention or conv, got {types!r}")
    return [kind == "full_attention" for kind in types]
