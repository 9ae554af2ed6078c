"""The model, a pre-norm decoder with rotary positions and grouped-query attention."""

from collections.abc import Iterator

from graftlm.contracts import ForwardBatch, ModelContext
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
    rope_frequencies,
)
from torch import Tensor

__all__ = ["Decoder"]


class Decoder(DecoderModel):
    """A decoder model. `DecoderModel` loads and packs the weights that each layer lists in `weight_slots`."""

    def __init__(self, context: ModelContext) -> None:
        shape, device, dtype = DecoderShape.from_config(context.config, context.parallel), context.device, context.dtype
        blocks = (Block(shape, context, layer_id) for layer_id in range(shape.num_layers))
        super().__init__(shape, context, blocks, RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype))
        self.rotary = RotaryEmbedding(rope_frequencies(context.config, shape.head_dim), device=device, dtype=dtype)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the final hidden states, [T, hidden]."""
        rotation = self.rotary(batch.positions)
        x, residual = self.embed(batch.input_ids), None
        for block in self.layers:
            x, residual = block(x, residual, rotation)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden


class Block(DecoderLayer):
    """A decoder layer: attention and feed-forward. Each has a norm before it, and a residual connection."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        self._shape = shape
        size, device, dtype = shape.hidden_size, context.device, context.dtype
        heads = {"q_proj": shape.q, "k_proj": shape.kv, "v_proj": shape.kv}  # this rank's part of each size
        self.attend_norm = RMSNorm(size, shape.eps, device=device, dtype=dtype)
        self.qkv = Linear(size, heads, device=device, dtype=dtype)
        self.attend = Attention(shape.attention_layer(layer_id))
        self.out = Linear(shape.q, {"o_proj": size}, device=device, dtype=dtype)
        self.mlp_norm = RMSNorm(size, shape.eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(size, shape.intermediate, shape.hidden_act, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return the feed-forward's result and the residual stream without this result; both are [T, hidden]."""
        x, residual = self.attend_norm(x, residual)
        num_heads, num_kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], -1, self._shape.head_dim)  # [T, H + 2 H_kv, D]
        qk, v = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        q, k = rotation(qk).split_with_sizes((num_heads, num_kv_heads), dim=1)
        x, residual = self.mlp_norm(self.out(self.attend(q, k, v)), residual)
        return self.mlp(x), residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the weight slots of the checkpoint's tensors whose names start with `prefix`."""
        yield from self.attend_norm.weight_slots(prefix, "input_layernorm")
        yield from self.qkv.weight_slots(f"{prefix}self_attn.")
        yield from self.out.weight_slots(f"{prefix}self_attn.")
        yield from self.mlp_norm.weight_slots(prefix, "post_attention_layernorm")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")
