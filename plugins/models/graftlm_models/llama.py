"""The Llama family (arXiv:2302.13971): pre-norm decoder with rotary positions and grouped-query attention."""

from collections.abc import Iterator

from torch import Tensor, nn

from graftlm.contracts import ForwardBatch, ModelConfig, ModelContext
from graftlm.errors import UnsupportedArchitectureError
from graftlm.layers import (
    Attention,
    DecoderLayer,
    DecoderModel,
    DecoderShape,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    WeightSlot,
    read_flag,
    rope_frequencies,
)

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        _check_windowless(context.config)
        shape, device, dtype = DecoderShape.from_config(context.config, context.parallel), context.device, context.dtype
        layers = (LlamaLayer(shape, context, layer_id) for layer_id in range(shape.num_layers))
        norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        super().__init__(shape, context, layers, norm)
        rope = rope_frequencies(context.config, shape.head_dim, context_len=context.context_len)
        self.rotary = RotaryEmbedding(rope, device=device, dtype=dtype)
        self._repeats_calls = context.parallel.repeats_calls

    @property
    def repeats_calls(self) -> bool:
        """True if the exchange between ranks can be repeated."""
        return self._repeats_calls

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


class LlamaLayer(DecoderLayer):
    """A decoder layer: attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.input_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.attention = LlamaAttention(shape, context, layer_id)
        self.post_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(
            shape.hidden_size,
            shape.intermediate,
            shape.hidden_act,
            bias=read_flag(context.config.raw, "mlp_bias"),
            device=device,
            dtype=dtype,
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
        yield from self.mlp.weight_slots(f"{prefix}mlp.")


class LlamaAttention(nn.Module):
    """Attention with projections and rotation."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        bias = read_flag(context.config.raw, "attention_bias")
        sizes = {"q_proj": shape.q, "k_proj": shape.kv, "v_proj": shape.kv}
        self.qkv = Linear(shape.hidden_size, sizes, bias=bias, device=device, dtype=dtype)
        self.out = Linear(shape.q, {"o_proj": shape.hidden_size}, bias=bias, device=device, dtype=dtype)
        self.attend = Attention(shape.attention_layer(layer_id))

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


def _check_windowless(config: ModelConfig) -> None:
    """Refuse a sliding window in the configuration of another family. Llama's own configuration ignores this entry.

    Raises:
        UnsupportedArchitectureError: config.json is of another family and has a sliding window.
    """
    window = config.raw.get("sliding_window")
    if window is not None and "LlamaForCausalLM" not in config.architectures:
        raise UnsupportedArchitectureError(
            f"config.json of {', '.join(config.architectures)} has sliding_window {window!r}, but Llama has no "
            f"sliding windows. Set model.architecture to auto, or to the provider of that architecture"
        )
