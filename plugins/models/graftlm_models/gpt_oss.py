"""GPT-OSS (arXiv:2508.10925): attention sinks, windows in every other layer, experts with a clamped SwiGLU."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.contracts import AttentionLayer, ForwardBatch, ModelConfig, ModelContext
from graftlm.layers import (
    Attention,
    DecoderLayer,
    DecoderModel,
    DecoderShape,
    Experts,
    Frequencies,
    Linear,
    MoE,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    Router,
    WeightSlot,
    cuts,
    empty_parameter,
    read_expert_counts,
    read_flag,
    read_layer_types,
    read_number,
    read_size,
    rope_frequencies,
    softmax_top_k,
)
from graftlm_models.mxfp4 import plain_weights

__all__ = ["GptOssForCausalLM"]

#: Defaults for entries that are missing in config.json.
_THETA = 150_000.0
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssForCausalLM(DecoderModel):
    """Maps tokens to logits. Experts in MXFP4 are decoded while they are loaded."""

    def __init__(self, context: ModelContext) -> None:
        config = _without_mxfp4(context.config)
        shape = DecoderShape.from_config(config, context.parallel)
        layers = (
            GptOssLayer(shape, context, shape.attention_layer(layer_id, window))
            for layer_id, window in enumerate(_sliding_windows(config, shape.num_layers))
        )
        super().__init__(shape, context, layers, _norm(shape, context))
        frequencies = _frequencies(config, shape.head_dim, context.context_len)
        self.rotary = RotaryEmbedding(frequencies, device=context.device, dtype=context.dtype)

    @property
    def selects_tokens(self) -> bool:
        """Always true: the last layer's feed-forward runs only for the tokens of `wanted_idx`."""
        return True

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden] or [W, hidden]; see the contract."""
        rotation = self.rotary(batch.positions)
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, rotation)
        x, residual = self.layers[-1](x, residual, rotation, batch.wanted_idx)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Decode experts in MXFP4."""
        return plain_weights(weights)


class GptOssLayer(DecoderLayer):
    """A decoder layer: attention and experts, each after a norm and added to the residual stream."""

    def __init__(self, shape: DecoderShape, context: ModelContext, spec: AttentionLayer) -> None:
        super().__init__()
        self.input_norm = _norm(shape, context)
        self.attention = GptOssAttention(shape, context, spec)
        self.post_norm = _norm(shape, context)
        self.mlp = _experts(shape, context)

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
        yield from self.mlp.router.weight_slots(f"{prefix}mlp.", "router")
        yield from self.mlp.experts.stacked_slots(f"{prefix}mlp.experts.", transposed=True)


class GptOssAttention(nn.Module):
    """Attention with projections, rotation and sinks."""

    def __init__(self, shape: DecoderShape, context: ModelContext, spec: AttentionLayer) -> None:
        super().__init__()
        self._shape = shape
        device, dtype = context.device, context.dtype
        bias = read_flag(context.config.raw, "attention_bias", default=True)
        sizes = {"q_proj": shape.q, "k_proj": shape.kv, "v_proj": shape.kv}
        self.qkv = Linear(shape.hidden_size, sizes, bias=bias, device=device, dtype=dtype)
        self.out = Linear(shape.q, {"o_proj": shape.hidden_size}, bias=bias, device=device, dtype=dtype)
        self.sinks = empty_parameter(shape.num_heads, device=device, dtype=dtype)
        self._heads = context.parallel.heads(shape.q.size // shape.head_dim, 1)
        self.attend = Attention(replace(spec, sinks=self.sinks))

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
        yield WeightSlot(f"{prefix}sinks", self.sinks, shards=cuts(self._heads))
        yield from self.out.weight_slots(prefix)


def _norm(shape: DecoderShape, context: ModelContext) -> RMSNorm:
    """Return a norm that multiplies by its float32 weight before it rounds, so that only one rounding occurs."""
    return RMSNorm(shape.hidden_size, shape.eps, device=context.device, dtype=torch.float32)


def _experts(shape: DecoderShape, context: ModelContext) -> MoE:
    raw, device, dtype = context.config.raw, context.device, context.dtype
    num_experts, top_k = read_expert_counts(raw)
    gate = partial(
        _clamped_swiglu,
        alpha=read_number(raw, "swiglu_alpha", default=1.702),
        limit=read_number(raw, "swiglu_limit", default=7.0),
    )
    choose = softmax_top_k(top_k, renormalise=True)
    router = Router(shape.hidden_size, num_experts, choose, bias=True, device=device, dtype=dtype)
    experts = Experts(num_experts, shape.hidden_size, shape.intermediate, gate, bias=True, device=device, dtype=dtype)
    return MoE(router, experts)


def _clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Map [N, 2 I] to [N, I]. Even columns are gates; each multiplies the odd column after it."""
    gate = gate_up[..., ::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _sliding_windows(config: ModelConfig, num_layers: int) -> Iterator[int | None]:
    """Yield each layer's window from `layer_types`. By default, layers 0, 2, 4 and so on have a window."""
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    for kind in read_layer_types(config.raw, default=alternating):
        yield read_size(config.raw, "sliding_window", default=128) if kind == "sliding_attention" else None


def _frequencies(config: ModelConfig, head_dim: int, context_len: int | None) -> Frequencies:
    has_rope = config.raw.get("rope_scaling") or config.raw.get("rope_parameters")
    rope = None if has_rope else {**_ROPE, "rope_theta": config.raw.get("rope_theta") or _THETA}
    return rope_frequencies(config, head_dim, rope, context_len=context_len, default_theta=_THETA)


def _without_mxfp4(config: ModelConfig) -> ModelConfig:
    """Return the configuration without its MXFP4 entry, because `load_weights` decodes the experts."""
    quantization: Any = config.raw.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "mxfp4":
        return config
    raw = {name: value for name, value in config.raw.items() if name != "quantization_config"}
    return replace(config, raw=raw)
