"""The Llama family (arXiv:2302.13971): pre-norm decoder with rotary positions and grouped-query attention."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer, ForwardBatch, Model, ModelConfig, ModelContext
from graftlm.errors import UnsupportedArchitectureError
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
    read_flag,
    read_weight,
    rope_frequencies,
)

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(nn.Module, Model):
    """Tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        _check_windowless(context.config)
        shape = DecoderShape.from_config(context.config)
        device, dtype = context.device, context.dtype
        self.embed = TokenEmbedding(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype)
        rope = rope_frequencies(context.config, shape.head_dim, context_len=context.context_len)
        self.rotary = RotaryEmbedding(rope, device=device, dtype=dtype)
        self.layers = nn.ModuleList(LlamaLayer(shape, context, layer_id) for layer_id in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        vocab = {"lm_head": shape.vocab_size}
        self.lm_head = None if shape.tied else Linear(shape.hidden_size, vocab, device=device, dtype=dtype)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """One per decoder layer."""
        return [layer.attention.attend.spec for layer in self._decoder_layers()]

    @property
    def repeats_calls(self) -> bool:
        """Always."""
        return True

    @property
    def selects_tokens(self) -> bool:
        """The last layer's output is computed for wanted tokens alone; see the contract."""
        return True

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Give every layer's call site the backend."""
        for layer in self._decoder_layers():
            layer.attention.attend.bind(backend)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden] or [W, hidden]; see the contract."""
        rotation = self.rotary(batch.positions)
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, rotation)
        x, residual = self.layers[-1](x, residual, rotation, batch.wanted_idx)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V], in the parameters' dtype."""
        return self.embed.logits(hidden) if self.lm_head is None else self.lm_head.forward(hidden)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a Hugging Face checkpoint in; see the contract."""
        copy_weights(self._weight_slots(), weights, self._aliases)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some tensors in; see the contract."""
        copy_weights(self._weight_slots(), weights, self._aliases, partial=True)

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of one weight; see the contract."""
        return read_weight(self._weight_slots(), name, self._aliases)

    def pack_weights(self) -> None:
        """Rearrange every matrix for this CPU; see the contract."""
        pack_linears(self)
        if self.lm_head is None:
            self.embed.pack_output()

    @property
    def _aliases(self) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    def _decoder_layers(self) -> Iterator["LlamaLayer"]:
        return (layer for layer in self.layers if isinstance(layer, LlamaLayer))

    def _weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.embed.weight_slots("model.", "embed_tokens")
        for i, layer in enumerate(self._decoder_layers()):
            yield from layer.weight_slots(f"model.layers.{i}.")
        yield from self.norm.weight_slots("model.", "norm")
        if self.lm_head is not None:
            yield from self.lm_head.weight_slots("")


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each after a norm, each added to the residual stream."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.input_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.attention = LlamaAttention(shape, context, layer_id)
        self.post_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(
            shape.hidden_size,
            shape.intermediate_size,
            shape.hidden_act,
            bias=read_flag(context.config.raw, "mlp_bias"),
            device=device,
            dtype=dtype,
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, wanted_idx: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what this layer adds to the residual stream, and the stream without it; both [T, hidden].

        Args:
            wanted_idx: the tokens for which both are wanted, int64 [W]; None: all are.
        """
        x, residual = self.input_norm(x, residual)
        x = self.attention(x, rotation, wanted_idx)
        if wanted_idx is not None:
            residual = residual.index_select(0, wanted_idx)
        x, residual = self.post_norm(x, residual)
        return self.mlp(x), residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield where `{prefix}...` tensors go."""
        yield from self.input_norm.weight_slots(prefix, "input_layernorm")
        yield from self.attention.weight_slots(f"{prefix}self_attn.")
        yield from self.post_norm.weight_slots(prefix, "post_attention_layernorm")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")


class LlamaAttention(nn.Module):
    """Projections and rotation around the attention call site."""

    def __init__(self, shape: DecoderShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        bias = read_flag(context.config.raw, "attention_bias")
        sizes = {"q_proj": shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
        self.qkv = Linear(shape.hidden_size, sizes, bias=bias, device=device, dtype=dtype)
        self.out = Linear(shape.q_size, {"o_proj": shape.hidden_size}, bias=bias, device=device, dtype=dtype)
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
        """Yield where `{prefix}...` tensors go."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.out.weight_slots(prefix)


def _check_windowless(config: ModelConfig) -> None:
    """Refuse another family's windows; a Llama's configuration class has no such entry and ignores it."""
    window = config.raw.get("sliding_window")
    if window is not None and "LlamaForCausalLM" not in config.architectures:
        raise UnsupportedArchitectureError(
            f"config.json of {', '.join(config.architectures)} gives sliding_window {window!r}, but Llama has no "
            f"windows. Set model.architecture to auto, or to the provider of that architecture"
        )
