"""The network of an EAGLE-3 head (arXiv:2503.01840): one Llama layer with a fused input and its own output projection.

    hidden states of three layers --fc--> feature --hidden_norm----\
                                                                    concatenated -- attention -- feed-forward -- output
    token after the position --embedding--------input_layernorm----/

The output is the feature of the next position. Its norm is projected to a part of the vocabulary, the draft vocabulary:
token i of the draft vocabulary is the served model's token d2t[i] + i.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer, DraftHead, DraftHeadContext
from graftlm.errors import CheckpointError, WeightError
from graftlm.layers import (
    Attention,
    DecoderShape,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    TokenEmbedding,
    WeightSlot,
    copy_weights,
    pack_linears,
    read_flag,
    rope_frequencies,
)
from graftlm_speculation.eagle3_config import Eagle3Config

__all__ = ["Eagle3Head"]

_EMBEDDING: Final = "embed_tokens.weight"
_MAPS: Final = ("d2t", "t2d")


class Eagle3Head(nn.Module, DraftHead):
    """Maps features and tokens to features, and features to logits of the draft vocabulary.

    A checkpoint without a token embedding uses that of the served model.

    Args:
        config: sizes of the head.
        context: the served model, and the device and the dtype of the parameters.

    Raises:
        CheckpointError: the sizes do not fit the served model.
    """

    def __init__(self, config: Eagle3Config, context: DraftHeadContext) -> None:
        super().__init__()
        served = context.served
        device, dtype = served.device, served.dtype
        shape = DecoderShape.from_config(config.model)
        size, eps = shape.hidden_size, shape.eps
        _check_fits(config, context)
        self._config, self._shape = config, shape
        self._served_vocab_size = served.config.vocab_size
        self._model = [context.model]  # in a list, so that the served model is not a submodule
        bias = read_flag(config.model.raw, "attention_bias")
        sizes = {"q_proj": shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
        self.embed: TokenEmbedding | None = None
        self.fc = Linear(config.served_size * len(config.hidden_layers), {"fc": size}, device=device, dtype=dtype)
        self.input_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.qkv = Linear(2 * size, sizes, bias=bias, device=device, dtype=dtype)
        self.out = Linear(shape.q_size, {"o_proj": size}, bias=bias, device=device, dtype=dtype)
        self.attend = Attention(shape.attention_layer(context.layer_id))
        self.post_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(size, shape.intermediate_size, shape.hidden_act, device=device, dtype=dtype)
        self.norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.lm_head = Linear(size, {"lm_head": config.draft_vocab_size}, device=device, dtype=dtype)
        rope = rope_frequencies(config.model, shape.head_dim, context_len=served.context_len)
        self.rotary = RotaryEmbedding(rope, device=device, dtype=dtype)
        self._targets: Tensor | None = None  # int64 [draft vocabulary]; None: the vocabularies are equal

    @property
    def attention_layer(self) -> AttentionLayer:
        """The attention layer."""
        return self.attend.spec

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers of the configuration."""
        return self._config.hidden_layers

    @property
    def feature_size(self) -> int:
        """Size of the head's hidden states."""
        return self._shape.hidden_size

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Set the backend."""
        self.attend.bind(backend)

    def features(self, hidden: Tensor) -> Tensor:
        """Map the inputs of the layers to features; the final hidden states are not read."""
        features: Tensor = self.fc(hidden[:, -self.fc.in_features :])
        return features

    def keys_and_values(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values; see `DraftHead`."""
        _, k, v = self._project(self._fused(features, token_ids)[0], positions)
        return k, v

    def forward(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the features of the next positions; see `DraftHead`."""
        x, normed = self._fused(features, token_ids)
        q, k, v = self._project(x, positions)
        residual = normed if self._config.norms_residual else features
        x, residual = self.post_norm(self.out(self.attend(q, k, v)), residual)
        following: Tensor = self.mlp(x) + residual
        return following

    def logits(self, features: Tensor) -> Tensor:
        """Map features to logits of the draft vocabulary."""
        logits: Tensor = self.lm_head(self.norm(features)[0])
        return logits

    def token_ids(self, idx: Tensor) -> Tensor:
        """Map indices of the draft vocabulary to token ids."""
        return idx if self._targets is None else self._targets.index_select(0, idx)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint; see `DraftHead`. Tensors of an embedding and of the vocabulary maps are optional."""
        plain, maps = [], {}
        for name, tensor in weights:
            if name in _MAPS:
                maps[name] = tensor
            else:
                plain.append((name, tensor))
        has_embedding = any(name == _EMBEDDING for name, _ in plain)
        if not has_embedding and self.feature_size != self._config.served_size:
            raise WeightError(
                f"The checkpoint lacks {_EMBEDDING!r}, and the head's hidden_size {self.feature_size} is not that of "
                f"the served model, {self._config.served_size}"
            )
        if has_embedding:
            weight = self.fc.weight
            self.embed = TokenEmbedding(
                self._config.model.vocab_size, self.feature_size, device=weight.device, dtype=weight.dtype
            )
        copy_weights(self._weight_slots(), plain)
        self._targets = self._read_maps(maps.get("d2t"), maps.get("t2d"))

    def pack_weights(self) -> None:
        """Rearrange every matrix for this CPU."""
        pack_linears(self)

    def _fused(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the attention, [T, 2 F], and the normalised features, [T, F]."""
        embedded = self._model[0].embed_tokens(token_ids) if self.embed is None else self.embed(token_ids)
        normed = self.hidden_norm(features)[0]
        return torch.cat([self.input_norm(embedded)[0], normed], dim=-1), normed

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys [T, H_kv, D] and values [T, H_kv, D]."""
        shape = self._shape
        qkv = self.qkv(x).view(x.shape[0], -1, shape.head_dim)
        qk, v = qkv.split_with_sizes((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        q, k = self.rotary(positions)(qk).split_with_sizes((shape.num_heads, shape.num_kv_heads), dim=1)
        return q, k, v

    def _weight_slots(self) -> Iterator[WeightSlot]:
        layer = self._config.layer_name
        if self.embed is not None:
            yield from self.embed.weight_slots("", "embed_tokens")
        yield from self.fc.weight_slots("")
        yield from self.input_norm.weight_slots(layer, "input_layernorm")
        yield from self.hidden_norm.weight_slots(layer, "hidden_norm")
        yield from self.qkv.weight_slots(f"{layer}self_attn.")
        yield from self.out.weight_slots(f"{layer}self_attn.")
        yield from self.post_norm.weight_slots(layer, "post_attention_layernorm")
        yield from self.mlp.weight_slots(f"{layer}mlp.")
        yield from self.norm.weight_slots("", "norm")
        yield from self.lm_head.weight_slots("")

    def _read_maps(self, d2t: Tensor | None, t2d: Tensor | None) -> Tensor | None:
        """Return the served model's token of each draft token, int64 [draft vocabulary]; None if they are equal.

        Raises:
            WeightError: a map is missing, or has a wrong shape or wrong values.
        """
        size, vocab_size = self._config.draft_vocab_size, self._served_vocab_size
        if d2t is None:
            if size != self._config.model.vocab_size:
                raise WeightError(f"The checkpoint lacks 'd2t', which maps its {size:,} draft tokens to token ids")
            return None
        if d2t.shape != (size,) or d2t.is_floating_point():
            raise WeightError(f"The checkpoint's 'd2t' is {d2t.dtype} {list(d2t.shape)}, expected integers [{size}]")
        device = self.fc.weight.device
        if device.type == "meta" or d2t.is_meta:
            return torch.empty(size, dtype=torch.int64, device=device)
        targets = d2t.to(torch.int64) + torch.arange(size)
        if int(targets.min()) < 0 or int(targets.max()) >= vocab_size:
            raise WeightError(f"The checkpoint's 'd2t' has token ids outside the served vocabulary of {vocab_size:,}")
        if t2d is not None:
            mask = torch.zeros(len(t2d), dtype=torch.bool)
            mask[targets[targets < len(t2d)]] = True
            if t2d.ndim != 1 or not torch.equal(mask, t2d.to(torch.bool)):
                raise WeightError("The checkpoint's 't2d' marks other tokens than those of 'd2t'")
        return targets.to(device)


def _check_fits(config: Eagle3Config, context: DraftHeadContext) -> None:
    """Refuse a head for a model of other sizes.

    Raises:
        CheckpointError: the sizes differ.
    """
    raw = context.served.config.raw
    if raw.get("hidden_size") != config.served_size:
        raise CheckpointError(
            f"the head was made for a model with hidden_size {config.served_size}, but the served model has "
            f"{raw.get('hidden_size')!r}"
        )
    if config.model.vocab_size != context.served.config.vocab_size:
        raise CheckpointError(
            f"the head was made for a vocabulary of {config.model.vocab_size:,} tokens, but the served model has "
            f"{context.served.config.vocab_size:,}"
        )
