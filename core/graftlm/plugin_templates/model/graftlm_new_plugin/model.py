"""The model: a pre-norm decoder with rotary positions and grouped-query attention."""

from collections.abc import Iterable, Iterator, Sequence

from graftlm.contracts import AttentionBackend, AttentionLayer, ForwardBatch, Model, ModelContext
from graftlm.layers import (
    Attention,
    DecoderShape,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    TokenEmbedding,
    WeightSlot,
    copy_weights,
    pack_linears,
    rope_frequencies,
)
from torch import Tensor, nn

__all__ = ["Decoder"]


class Decoder(nn.Module, Model):
    """Tokens to logits. Every layer names its tensors in the checkpoint by `weight_slots`."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        shape = DecoderShape.from_config(context.config)
        device, dtype = context.device, context.dtype
        self.embed = TokenEmbedding(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype)
        self.rotary = RotaryEmbedding(rope_frequencies(context.config, shape.head_dim), device=device, dtype=dtype)
        self.blocks = [Block(shape, context, layer_id) for layer_id in range(shape.num_layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        vocab = {"lm_head": shape.vocab_size}
        self.lm_head = None if shape.tied else Linear(shape.hidden_size, vocab, device=device, dtype=dtype)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """One for each block."""
        return [block.attend.spec for block in self.blocks]

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Give every call site the backend."""
        for block in self.blocks:
            block.attend.bind(backend)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden]."""
        rotation = self.rotary(batch.positions)
        x, residual = self.embed(batch.input_ids), None
        for block in self.blocks:
            x, residual = block(x, residual, rotation)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V]."""
        return self.embed.logits(hidden) if self.lm_head is None else self.lm_head.forward(hidden)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint in; a missing, surplus or wrong-shaped tensor is an error that names it."""
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}
        copy_weights(self._weight_slots(), weights, tied)

    def pack_weights(self) -> None:
        """Rearrange every matrix for this CPU."""
        pack_linears(self)
        if self.lm_head is None:
            self.embed.pack_output()

    def _weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.embed.weight_slots("model.", "embed_tokens")
        for i, block in enumerate(self.blocks):
            yield from block.weight_slots(f"model.layers.{i}.")
        yield from self.norm.weight_slots("model.", "norm")
        if self.lm_head is not None:
            yield from self.lm_head.weight_slots("")


class Block(nn.Module):
    """Attention and feed-forward, each after a norm, each added to the residual stream."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        self._shape = shape
        size, device, dtype = shape.hidden_size, context.device, context.dtype
        heads = {"q_proj": shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
        self.attend_norm = RMSNorm(size, shape.eps, device=device, dtype=dtype)
        self.qkv = Linear(size, heads, device=device, dtype=dtype)
        self.attend = Attention(shape.attention_layer(layer_id))
        self.out = Linear(shape.q_size, {"o_proj": size}, device=device, dtype=dtype)
        self.mlp_norm = RMSNorm(size, shape.eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(size, shape.intermediate_size, shape.hidden_act, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return what this block adds to the residual stream, and the stream without it; both [T, hidden]."""
        x, residual = self.attend_norm(x, residual)
        num_heads, num_kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], -1, self._shape.head_dim)  # [T, H + 2 H_kv, D]
        qk, v = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        q, k = rotation(qk).split_with_sizes((num_heads, num_kv_heads), dim=1)
        x, residual = self.mlp_norm(self.out(self.attend(q, k, v)), residual)
        return self.mlp(x), residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield where `{prefix}...` tensors go."""
        yield from self.attend_norm.weight_slots(prefix, "input_layernorm")
        yield from self.qkv.weight_slots(f"{prefix}self_attn.")
        yield from self.out.weight_slots(f"{prefix}self_attn.")
        yield from self.mlp_norm.weight_slots(prefix, "post_attention_layernorm")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")
