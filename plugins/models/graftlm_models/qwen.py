"""The Qwen family: Qwen 2 and 2.5 (arXiv:2407.10671) and Qwen 3 (arXiv:2505.09388), dense or with experts.

They have Llama's structure. Qwen 2 adds biases to projections, and sliding windows; Qwen 3 normalises query and key
heads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from graftlm.contracts import AttentionLayer, ForwardBatch, ModelConfig, ModelContext
from graftlm.errors import UnsupportedArchitectureError
from graftlm.layers import (
    Attention,
    DecoderLayer,
    DecoderModel,
    DecoderShape,
    GatedMLP,
    Linear,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    WeightSlot,
    read_flag,
    read_layer_types,
    read_size,
    rope_frequencies,
    routes_tokens,
)
from graftlm_models.qwen_moe import QwenMoE

__all__ = ["QwenForCausalLM"]


@dataclass(frozen=True, slots=True)
class QwenVariant:
    """The parts in which the generations of Qwen models differ.

    Attributes:
        qkv_bias, out_bias: whether these projections have a bias.
        qk_norm: whether query and key heads are normalised.
        head_dim: D if config.json has no head size; None: hidden_size / num_attention_heads.
        has_window: function that returns whether a layer has a sliding window, given its index and
            `max_window_layers`. It is used if config.json enables windows but has no `layer_types`.
        has_experts: whether all or some of the feed-forward layers have experts.
        has_shared_expert: whether the layers with experts also have a shared expert.
    """

    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    head_dim: int | None
    has_window: Callable[[int, int], bool]
    has_experts: bool = False
    has_shared_expert: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig) -> "QwenVariant":
        """Return the variant of a configuration's architecture.

        Raises:
            CheckpointError: a flag is not true or false.
            UnsupportedArchitectureError: the architecture is not of this family.
        """
        for architecture, variant in _VARIANTS.items():
            if architecture in config.architectures:
                return variant(config.raw)
        raise UnsupportedArchitectureError(
            f"config.json names {', '.join(config.architectures)}. Available: {', '.join(_VARIANTS)}"
        )


def _from_bound(layer: int, bound: int) -> bool:
    return layer >= bound


def _qwen2(raw: Mapping[str, Any]) -> QwenVariant:
    return QwenVariant(qkv_bias=True, out_bias=False, qk_norm=False, head_dim=None, has_window=_from_bound)


def _qwen2_moe(raw: Mapping[str, Any]) -> QwenVariant:
    return QwenVariant(
        qkv_bias=read_flag(raw, "qkv_bias", default=True),
        out_bias=False,
        qk_norm=False,
        head_dim=None,
        has_window=lambda layer, bound: layer % 2 == 0 and layer < bound,
        has_experts=True,
        has_shared_expert=True,
    )


def _qwen3(raw: Mapping[str, Any]) -> QwenVariant:
    bias = read_flag(raw, "attention_bias")
    return QwenVariant(qkv_bias=bias, out_bias=bias, qk_norm=True, head_dim=128, has_window=_from_bound)


def _qwen3_moe(raw: Mapping[str, Any]) -> QwenVariant:
    return replace(_qwen3(raw), head_dim=None, has_window=lambda layer, bound: True, has_experts=True)


_VARIANTS: dict[str, Callable[[Mapping[str, Any]], QwenVariant]] = {
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


class QwenForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        variant = QwenVariant.from_config(context.config)
        shape = DecoderShape.from_config(context.config, context.parallel, head_dim=variant.head_dim)
        device, dtype = context.device, context.dtype
        layers = (
            QwenLayer(shape, variant, context, shape.attention_layer(layer_id, window))
            for layer_id, window in enumerate(_sliding_windows(context.config.raw, shape.num_layers, variant))
        )
        norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        super().__init__(shape, context, layers, norm)
        rope = rope_frequencies(context.config, shape.head_dim, context_len=context.context_len)
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


class QwenLayer(DecoderLayer):
    """A decoder layer: attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, shape: DecoderShape, variant: QwenVariant, context: ModelContext, spec: AttentionLayer) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.input_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.attention = QwenAttention(shape, variant, context, spec)
        self.post_norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mlp = (
            QwenMoE(shape, context, has_shared_expert=variant.has_shared_expert)
            if variant.has_experts and QwenMoE.replaces_mlp(context.config.raw, spec.layer_id)
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
        yield from self.mlp.weight_slots(f"{prefix}mlp.")


class QwenAttention(nn.Module):
    """Attention with projections, head norms and rotation."""

    def __init__(self, shape: DecoderShape, variant: QwenVariant, context: ModelContext, spec: AttentionLayer) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        sizes = {"q_proj": shape.q, "k_proj": shape.kv, "v_proj": shape.kv}
        hidden = {"o_proj": shape.hidden_size}
        self.qkv = Linear(shape.hidden_size, sizes, bias=variant.qkv_bias, device=device, dtype=dtype)
        self.qk_norm = (
            QKNorm(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.eps, device=device, dtype=dtype)
            if variant.qk_norm
            else None
        )
        self.out = Linear(shape.q, hidden, bias=variant.out_bias, device=device, dtype=dtype)
        self.attend = Attention(spec)

    def forward(self, x: Tensor, rotation: Rotation, wanted_idx: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to the rows of `wanted_idx`, int64 [W]."""
        shape = self._shape
        qkv = self.qkv(x).view(x.shape[0], -1, shape.head_dim)  # [T, H + 2 H_kv, D]
        qk, v = qkv.split_with_sizes((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = rotation(qk).split_with_sizes((shape.num_heads, shape.num_kv_heads), dim=1)
        mixed = self.attend(q, k, v)
        out: Tensor = self.out(mixed if wanted_idx is None else mixed.index_select(0, wanted_idx))
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.qkv.weight_slots(prefix)
        if self.qk_norm is not None:
            yield from self.qk_norm.weight_slots(prefix)
        yield from self.out.weight_slots(prefix)


def _sliding_windows(raw: Mapping[str, Any], num_layers: int, variant: QwenVariant) -> list[int | None]:
    """Read each layer's window from `layer_types`, or from `max_window_layers` if there are no layer types."""
    if not read_flag(raw, "use_sliding_window"):
        return [None] * num_layers
    window, bound = read_size(raw, "sliding_window", default=4096), raw.get("max_window_layers", 28)
    default = ["sliding_attention" if variant.has_window(i, bound) else "full_attention" for i in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in read_layer_types(raw, default)]
