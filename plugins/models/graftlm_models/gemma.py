"""The Gemma family's text models: Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786).

Attention and feed-forward each have a norm before and after them. Sliding-window layers alternate with layers of full
attention, and embeddings are scaled. Gemma 2 caps attention scores and logits. Gemma 3 normalises query and key heads
instead, and has separate rotary frequencies for sliding and full layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.contracts import AttentionLayer, ForwardBatch, ModelConfig, ModelContext
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers import (
    Attention,
    DecoderLayer,
    DecoderModel,
    DecoderShape,
    Frequencies,
    GatedMLP,
    GemmaQKNorm,
    GemmaRMSNorm,
    Linear,
    RotaryEmbedding,
    Rotation,
    WeightSlot,
    read_flag,
    read_layer_types,
    read_number,
    read_size,
    rope_frequencies,
)

__all__ = ["GemmaForCausalLM"]

_ALL_LAYERS = "all_layers"


@dataclass(frozen=True, slots=True)
class GemmaVariant:
    """The properties in which the generations of Gemma and their checkpoints differ.

    Attributes:
        layer_types: "full_attention" or "sliding_attention" for each layer_id.
        window: size of the sliding layers' window in tokens; None: there are no sliding layers.
        scale: factor of the attention scores.
        attention_soft_cap, logit_soft_cap: a cap c replaces scores or logits s by c * tanh(s / c); None: no cap.
        qk_norm: whether query and key heads are normalised.
        bias: whether the projections of attention have a bias.
        hidden_act: name of the feed-forward activation.
        ropes: layer type -> rotary frequencies, or a single entry "all_layers".
    """

    layer_types: tuple[str, ...]
    window: int | None
    scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    qk_norm: bool
    bias: bool
    hidden_act: str
    ropes: Mapping[str, Frequencies]

    @classmethod
    def from_config(cls, config: ModelConfig, shape: DecoderShape) -> "GemmaVariant":
        """Read config.json of either generation.

        Raises:
            CheckpointError: an entry of config.json has a wrong type.
            UnsupportedArchitectureError: config.json names neither generation, or an unsupported feature.
        """
        if read_flag(config.raw, "use_bidirectional_attention"):
            raise UnsupportedArchitectureError(
                "config.json sets use_bidirectional_attention, but only causal attention is supported"
            )
        if "Gemma2ForCausalLM" in config.architectures:
            return cls._gemma2(config, shape)
        if "Gemma3ForCausalLM" in config.architectures:
            return cls._gemma3(config, shape)
        raise UnsupportedArchitectureError(
            f"config.json names {', '.join(config.architectures)}. Available: Gemma2ForCausalLM, Gemma3ForCausalLM"
        )

    @classmethod
    def _gemma2(cls, config: ModelConfig, shape: DecoderShape) -> "GemmaVariant":
        raw = config.raw
        layer_types = _layer_types(raw, shape.num_layers, period=2)
        return cls(
            layer_types=layer_types,
            window=_window(raw, layer_types),
            scale=_scale(raw),
            attention_soft_cap=_soft_cap(raw, "attn_logit_softcapping", default=50.0),
            logit_soft_cap=_soft_cap(raw, "final_logit_softcapping", default=30.0),
            qk_norm=False,
            bias=read_flag(raw, "attention_bias"),
            hidden_act=_hidden_act(raw),
            ropes={_ALL_LAYERS: rope_frequencies(config, shape.head_dim)},
        )

    @classmethod
    def _gemma3(cls, config: ModelConfig, shape: DecoderShape) -> "GemmaVariant":
        raw = config.raw
        if raw.get("attn_logit_softcapping") is not None:
            raise UnsupportedArchitectureError(
                f"config.json gives attn_logit_softcapping {raw['attn_logit_softcapping']!r}, but Gemma 3 does not cap "
                f"attention scores; set it to null"
            )
        layer_types = _layer_types(raw, shape.num_layers, period=read_size(raw, "sliding_window_pattern", default=6))
        return cls(
            layer_types=layer_types,
            window=_window(raw, layer_types),
            scale=_scale(raw),
            attention_soft_cap=None,
            logit_soft_cap=_soft_cap(raw, "final_logit_softcapping", default=None),
            qk_norm=True,
            bias=read_flag(raw, "attention_bias"),
            hidden_act=_hidden_act(raw),
            ropes=_ropes_by_type(config, shape.head_dim),
        )

    def attention_layer(self, shape: DecoderShape, layer_id: int) -> AttentionLayer:
        """Describe one layer's attention to the backend."""
        window = self.window if self.layer_types[layer_id] == "sliding_attention" else None
        return shape.attention_layer(layer_id, window, scale=self.scale, soft_cap=self.attention_soft_cap)

    def rope_of(self, layer_id: int) -> str:
        """Return the key of `ropes` that a layer uses."""
        return _ALL_LAYERS if _ALL_LAYERS in self.ropes else self.layer_types[layer_id]


class GemmaForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        shape = DecoderShape.from_config(context.config, context.parallel, head_dim=256, tied=True)
        variant = GemmaVariant.from_config(context.config, shape)
        device, dtype = context.device, context.dtype
        layers = (GemmaLayer(shape, variant, context, layer_id) for layer_id in range(shape.num_layers))
        super().__init__(shape, context, layers, GemmaRMSNorm(shape.hidden_size, shape.eps, device=device))
        self._embed_scale = _rounded(shape.hidden_size**0.5, dtype)
        self._logit_soft_cap = variant.logit_soft_cap
        self._repeats_calls = context.parallel.repeats_calls
        self.rotaries = nn.ModuleDict(
            {name: RotaryEmbedding(rope, device=device, dtype=dtype) for name, rope in variant.ropes.items()}
        )

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
        rotations = {name: rotary(batch.positions) for name, rotary in self.rotaries.items()}
        x, residual = self.embedded(batch), None
        *layers, last = self._decoder_layers()
        for layer in layers:
            x, residual = layer(x, residual, rotations[layer.rope])
        x, residual = last(x, residual, rotations[last.rope], batch.wanted_idx)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Map token ids, int64 [T], to scaled embeddings, [T, hidden]."""
        return super().embed_tokens(token_ids).mul_(self._embed_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V], in the parameters' dtype."""
        logits = super().logits(hidden)
        cap = self._logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _decoder_layers(self) -> Iterator["GemmaLayer"]:
        return (layer for layer in self.layers if isinstance(layer, GemmaLayer))


class GemmaLayer(DecoderLayer):
    """A decoder layer: attention and feed-forward, each between two norms and added to the residual stream.

    Attributes:
        rope: key of the layer's rotation in the model's `rotaries`.
    """

    def __init__(self, shape: DecoderShape, variant: GemmaVariant, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.rope = variant.rope_of(layer_id)
        self.input_norm = GemmaRMSNorm(shape.hidden_size, shape.eps, device=device)
        self.attention = GemmaAttention(shape, variant, context, layer_id)
        self.post_attention_norm = GemmaRMSNorm(shape.hidden_size, shape.eps, device=device)
        self.pre_mlp_norm = GemmaRMSNorm(shape.hidden_size, shape.eps, device=device)
        self.mlp = GatedMLP(shape.hidden_size, shape.intermediate, variant.hidden_act, device=device, dtype=dtype)
        self.post_mlp_norm = GemmaRMSNorm(shape.hidden_size, shape.eps, device=device)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, wanted_idx: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return this layer's addition to the residual stream, and the stream without it; both [T, hidden].

        Args:
            wanted_idx: the tokens to return, int64 [W]; None: all.
        """
        x, residual = self.input_norm(x, residual)
        x, _ = self.post_attention_norm(self.attention(x, rotation, wanted_idx))
        if wanted_idx is not None:
            residual = residual.index_select(0, wanted_idx)
        x, residual = self.pre_mlp_norm(x, residual)
        x, _ = self.post_mlp_norm(self.mlp(x))
        return x, residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.input_norm.weight_slots(prefix, "input_layernorm")
        yield from self.attention.weight_slots(f"{prefix}self_attn.")
        yield from self.post_attention_norm.weight_slots(prefix, "post_attention_layernorm")
        yield from self.pre_mlp_norm.weight_slots(prefix, "pre_feedforward_layernorm")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")
        yield from self.post_mlp_norm.weight_slots(prefix, "post_feedforward_layernorm")


class GemmaAttention(nn.Module):
    """Attention with projections, head norms and rotation."""

    def __init__(self, shape: DecoderShape, variant: GemmaVariant, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        sizes = {"q_proj": shape.q, "k_proj": shape.kv, "v_proj": shape.kv}
        hidden = {"o_proj": shape.hidden_size}
        self.qkv = Linear(shape.hidden_size, sizes, bias=variant.bias, device=device, dtype=dtype)
        self.qk_norm = (
            GemmaQKNorm(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.eps, device=device)
            if variant.qk_norm
            else None
        )
        self.out = Linear(shape.q, hidden, bias=variant.bias, device=device, dtype=dtype)
        self.attend = Attention(variant.attention_layer(shape, layer_id))

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


def _layer_types(raw: Mapping[str, Any], num_layers: int, period: int) -> tuple[str, ...]:
    """Read each layer's type. If config.json has no list of types, every `period`-th layer has full attention."""
    default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]
    return read_layer_types(raw, default)


def _window(raw: Mapping[str, Any], layer_types: Sequence[str]) -> int | None:
    if "sliding_attention" not in layer_types:
        return None
    if "sliding_window" in raw and raw["sliding_window"] is None:
        raise CheckpointError("config.json has layers of sliding_attention, but its sliding_window is null")
    return read_size(raw, "sliding_window", default=4096)


def _scale(raw: Mapping[str, Any]) -> float:
    scale: float = read_number(raw, "query_pre_attn_scalar", default=256) ** -0.5
    return scale


def _hidden_act(raw: Mapping[str, Any]) -> str:
    """Read the activation. Gemma's files may name another activation in `hidden_act`, which is ignored."""
    return str(raw.get("hidden_activation") or "gelu_pytorch_tanh")


def _soft_cap(raw: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """Read a soft cap. Null means no cap; a missing entry means the default."""
    if name not in raw:
        return default
    return None if raw[name] is None else read_number(raw, name)


def _ropes_by_type(config: ModelConfig, head_dim: int) -> dict[str, Frequencies]:
    """Read `rope_parameters` by layer type, or the older entries. `rope_scaling` applies only to full layers."""
    raw = config.raw
    by_type = _object(raw, "rope_parameters")
    defaults = {
        "full_attention": raw.get("rope_theta") or 1_000_000.0,
        "sliding_attention": raw.get("rope_local_base_freq") or 10_000.0,
    }
    if not by_type.keys() <= defaults.keys():
        raise CheckpointError(
            f"config.json needs rope_parameters with entries {' and '.join(defaults)}, got {', '.join(by_type)}"
        )
    ropes = {kind: {"rope_theta": theta, **_object(by_type, kind)} for kind, theta in defaults.items()}
    ropes["full_attention"] |= _object(raw, "rope_scaling")
    return {kind: rope_frequencies(config, head_dim, rope) for kind, rope in ropes.items()}


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Read an object. A missing or null entry counts as an empty object."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"config.json needs {name} as an object, got {value!r}")
    return value or {}


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Round a number to a dtype's precision, because the factor of Gemma's embeddings has their dtype."""
    return float(torch.tensor(value).to(dtype))
