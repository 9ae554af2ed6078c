"""The Mistral family (arXiv:2310.06825): Llama's structure without biases, and with sliding windows.

In Mistral, either all layers have the same window or none has a window. In Ministral, config.json lists the layers with
a window. Mixtral (arXiv:2401.04088) is Mistral with a mixture of experts in place of each feed-forward layer.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from graftlm.contracts import AttentionLayer, ForwardBatch, ModelConfig, ModelContext
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
    read_layer_types,
    read_size,
    rope_frequencies,
    routes_tokens,
    softmax_top_k,
)

__all__ = ["MistralForCausalLM"]


class MistralForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        _check_unbiased(context.config)
        shape, device, dtype = DecoderShape.from_config(context.config, context.parallel), context.device, context.dtype
        layers = (
            MistralLayer(shape, context, shape.attention_layer(layer_id, window))
            for layer_id, window in enumerate(_sliding_windows(context.config, shape.num_layers))
        )
        norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        super().__init__(shape, context, layers, norm)
        rope = rope_frequencies(
            context.config,
            shape.head_dim,
            context_len=context.context_len,
            default_theta=1e6 if _is_mixtral(context.config) else 1e4,
        )
        self.rotary = RotaryEmbedding(rope, device=device, dtype=dtype)
        self._repeats_calls = context.parallel.repeats_calls

    @property
    def repeats_calls(self) -> bool:
        """True if the model has no experts, and the exchange between ranks can be repeated."""
        return not routes_tokens(self) and self._repeats_calls

    @property
    def selects_tokens(self) -> bool:
        """Always true: the last layer's feed-forward runs only for the tokens of `wanted_idx`."""
        return True

    @property
    def takes_features(self) -> bool:
        """Always true."""
        return True

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden] or [W, hidden]; see the contract."""
        rotation = self.rotary(batch.positions)
        x, residual = self.embedded(batch), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, rotation)
        x, residual = self.layers[-1](x, residual, rotation, batch.wanted_idx)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden


class MistralLayer(DecoderLayer):
    """A decoder layer: attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, shape: DecoderShape, context: ModelContext, spec: AttentionLayer) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.input_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.attention = MistralAttention(shape, context, spec)
        self.post_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mlp = (
            MixtralMoE(shape, context)
            if _is_mixtral(context.config)
            else GatedMLP(shape.hidden_size, shape.intermediate, shape.hidden_act, device=device, dtype=dtype)
        )

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
        mlp = "block_sparse_moe." if isinstance(self.mlp, MixtralMoE) else "mlp."
        yield from self.mlp.weight_slots(f"{prefix}{mlp}")


class MixtralMoE(nn.Module):
    """A mixture of experts in place of a feed-forward layer. The weights of a token's experts sum to 1."""

    def __init__(self, shape: DecoderShape, context: ModelContext) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        num_experts, top_k = read_expert_counts(context.config.raw)
        choose = softmax_top_k(top_k, renormalise=True)
        self.moe = MoE(
            Router(shape.hidden_size, num_experts, choose, device=device, dtype=dtype),
            Experts(
                num_experts,
                shape.hidden_size,
                shape.intermediate,
                shape.hidden_act,
                device=device,
                dtype=dtype,
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        out: Tensor = self.moe(x)
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.moe.router.weight_slots(prefix, "gate")
        yield from self.moe.experts.weight_slots(f"{prefix}experts.", gate="w1", up="w3", down="w2")


class MistralAttention(nn.Module):
    """Attention with projections and rotation."""

    def __init__(self, shape: DecoderShape, context: ModelContext, spec: AttentionLayer) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        sizes = {"q_proj": shape.q, "k_proj": shape.kv, "v_proj": shape.kv}
        self.qkv = Linear(shape.hidden_size, sizes, device=device, dtype=dtype)
        self.out = Linear(shape.q, {"o_proj": shape.hidden_size}, device=device, dtype=dtype)
        self.attend = Attention(spec)

    def forward(self, x: Tensor, rotation: Rotation, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        shape = self._shape
        qkv = self.qkv(x).view(x.shape[0], -1, shape.head_dim)  # [T, H + 2 H_kv, D]
        qk, v = qkv.split_with_sizes((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        q, k = rotation(qk).split_with_sizes((shape.num_heads, shape.num_kv_heads), dim=1)
        mixed = self.attend(q, k, v)
        out: Tensor = self.out(mixed if wanted_idx is None else mixed.index_select(0, wanted_idx))
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.out.weight_slots(prefix)


def _is_mixtral(config: ModelConfig) -> bool:
    return "MixtralForCausalLM" in config.architectures


def _check_unbiased(config: ModelConfig) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if read_flag(config.raw, name):
            raise UnsupportedArchitectureError(
                f"config.json sets {name}, but projections of {', '.join(config.architectures)} have no biases. "
                f"If the checkpoint is a Llama, set architectures to LlamaForCausalLM"
            )


def _sliding_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """Read each layer's window. Null means no window. A missing entry means 4096 tokens, or no window for Mixtral."""
    raw = config.raw
    if "MinistralForCausalLM" not in config.architectures and raw.get("layer_types") is not None:
        raise UnsupportedArchitectureError(
            f"config.json has layer_types, but all layers of {', '.join(config.architectures)} have the same type. "
            f"If they differ in this checkpoint, set architectures to MinistralForCausalLM"
        )
    has_windows = raw.get("sliding_window", None if _is_mixtral(config) else 4096) is not None
    types = read_layer_types(raw, ["sliding_attention" if has_windows else "full_attention"] * num_layers)
    if "sliding_attention" not in types:
        return [None] * num_layers
    if not has_windows:
        raise CheckpointError("config.json has layers of sliding_attention, but its sliding_window is null")
    window = read_size(raw, "sliding_window", default=4096)
    return [window if kind == "sliding_attention" else None for kind in types]
