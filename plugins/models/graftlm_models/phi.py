"""The Phi family: Phi 3 (arXiv:2404.14219) and Phi 4 (arXiv:2412.08905, arXiv:2503.01743).

They have Llama's structure without biases, and with sliding windows. In the checkpoint, the projections of query, key
and value are one matrix, and the projections of gate and up are another matrix. In Phi 4 mini, three quarters of a
head's dimensions are rotated.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from graftlm.contracts import AttentionLayer, ForwardBatch, ModelConfig, ModelContext
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
    read_size,
    rope_frequencies,
)

__all__ = ["PhiForCausalLM"]


class PhiForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        shape, device, dtype = DecoderShape.from_config(context.config, context.parallel), context.device, context.dtype
        window = _sliding_window(context.config)
        layers = (
            PhiLayer(shape, context, shape.attention_layer(layer_id, window)) for layer_id in range(shape.num_layers)
        )
        norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        super().__init__(shape, context, layers, norm)
        rope = rope_frequencies(context.config, shape.head_dim, partial=True, context_len=context.context_len)
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


class PhiLayer(DecoderLayer):
    """A decoder layer: attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, shape: DecoderShape, context: ModelContext, spec: AttentionLayer) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.input_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.attention = PhiAttention(shape, context, spec)
        self.post_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(
            shape.hidden_size,
            shape.intermediate,
            shape.hidden_act,
            gate_up=("gate_up_proj",),
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


class PhiAttention(nn.Module):
    """Attention with projections and rotation."""

    def __init__(self, shape: DecoderShape, context: ModelContext, spec: AttentionLayer) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        sizes = {"qkv_proj": shape.q.then(shape.kv).then(shape.kv)}
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


def _sliding_window(config: ModelConfig) -> int | None:
    """Read the window of all layers; None if it is null, missing, or at least as long as the context (Phi 4 mini)."""
    if config.raw.get("sliding_window") is None:
        return None
    window = read_size(config.raw, "sliding_window")
    return window if window < config.max_position_embeddings else None
