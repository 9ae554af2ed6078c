"""Reads the sizes of a Llama-like decoder from config.json, and checks every number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from graftlm.contracts import ONE_RANK, AttentionLayer, ModelConfig, ParallelContext, Shard
from graftlm.errors import CheckpointError, UnsupportedArchitectureError

__all__ = [
    "DecoderShape",
    "VocabularyShape",
    "is_positive",
    "read_flag",
    "read_layer_types",
    "read_number",
    "read_size",
]

#: Largest number that is accepted from config.json. In float32, and in narrower types, larger numbers are infinite.
_LARGEST = torch.finfo(torch.float32).max

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class VocabularyShape:
    """The sizes of the embedding and the output projection, for decoders without the other sizes of `DecoderShape`.

    Attributes:
        tied: whether the output projection is the token embedding.
    """

    vocab_size: int
    hidden_size: int
    tied: bool


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes that Llama and its descendants share, with the parts of one rank.

    Attributes:
        num_heads: number of query heads H of the rank.
        num_kv_heads: number of key/value heads H_kv of the rank.
        head_dim: head dimension D.
        eps: epsilon of the RMS norms.
        hidden_act: name of the feed-forward activation.
        tied: whether the output projection is the token embedding.
        q: the rank's part of the features of all query heads.
        kv: the rank's part of the features of all key heads, or of all value heads.
        intermediate: the rank's part of `intermediate_size`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    hidden_act: str
    tied: bool
    q: Shard
    kv: Shard
    intermediate: Shard

    @property
    def q_size(self) -> int:
        """Number of features of the rank's query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of features of the rank's key heads, or of its value heads."""
        return self.num_kv_heads * self.head_dim

    def attention_layer(
        self,
        layer_id: int,
        sliding_window: int | None = None,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> AttentionLayer:
        """Return the shape of one layer's attention; without `scale`, scores are scaled by 1 / sqrt(D)."""
        return AttentionLayer(
            layer_id=layer_id,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        parallel: ParallelContext = ONE_RANK,
        *,
        head_dim: int | None = None,
        tied: bool = False,
    ) -> "DecoderShape":
        """Read config.json.

        Args:
            config: the checkpoint's configuration.
            parallel: the ranks that split the heads and the feed-forward layers.
            head_dim: default of D if it is missing in config.json; None: hidden_size / num_attention_heads.
            tied: default of `tie_word_embeddings` if it is missing in config.json.

        Raises:
            CheckpointError: a size is missing, or the sizes are inconsistent.
            UnsupportedArchitectureError: the weights are quantized in an unsupported format.
            ConfigError: the ranks cannot share the heads or the feed-forward layers equally.
        """
        raw = config.raw
        _check_plain(raw)
        hidden_size, num_heads = read_size(raw, "hidden_size"), read_size(raw, "num_attention_heads")
        num_kv_heads = read_size(raw, "num_key_value_heads", default=num_heads)
        head_dim = read_size(raw, "head_dim", default=head_dim or hidden_size // num_heads)
        intermediate_size = read_size(raw, "intermediate_size")
        if num_heads % num_kv_heads or head_dim % 2:
            raise CheckpointError(
                f"config.json has num_attention_heads {num_heads}, num_key_value_heads {num_kv_heads} "
                f"and head_dim {head_dim}; num_attention_heads must be a multiple of num_key_value_heads, and "
                "head_dim must be even"
            )
        counts = {"num_attention_heads": num_heads, "intermediate_size": intermediate_size}
        parallel.check(counts, {"num_key_value_heads": num_kv_heads})
        q, kv = parallel.heads(num_heads, head_dim), parallel.heads(num_kv_heads, head_dim)
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=read_size(raw, "num_hidden_layers"),
            num_heads=q.length // head_dim,
            num_kv_heads=kv.length // head_dim,
            head_dim=head_dim,
            eps=_read_eps(raw),
            hidden_act=str(raw.get("hidden_act", "silu")),
            tied=read_flag(raw, "tie_word_embeddings", default=tied),
            q=q,
            kv=kv,
            intermediate=parallel.shard(intermediate_size, "intermediate_size"),
        )


def read_size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Read an integer above 0; null counts as absent.

    Raises:
        CheckpointError: the value is absent without a default, or is not an integer above 0.
    """
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config.json needs {name} as a whole number above 0, got {value!r}")
    return value


def read_flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Read true or false; null counts as absent.

    Raises:
        CheckpointError: the value is not a boolean.
    """
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json needs {name} as true or false, got {value!r}")
    return value


def read_number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Read a number above 0; null counts as absent.

    Raises:
        CheckpointError: the value is absent without a default, or is not a number above 0.
    """
    value = raw.get(name)
    value = default if value is None else value
    if not is_positive(value):
        raise CheckpointError(f"config.json needs {name} as a number above 0, got {value!r}")
    return float(value)


def is_positive(value: object) -> TypeGuard[float]:
    """Return whether a value of config.json is a number above 0 in the range of float32 (not NaN, Infinity, 1e39)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST


def read_layer_types(raw: Mapping[str, Any], default: Sequence[str]) -> tuple[str, ...]:
    """Read each layer's kind of attention: "full_attention" or "sliding_attention".

    Args:
        raw: config.json.
        default: kinds that are used if `layer_types` is absent or null, one per layer.

    Raises:
        CheckpointError: `layer_types` has another length or other entries.
    """
    types = raw.get("layer_types")
    types = default if types is None else types
    fits = isinstance(types, Sequence) and len(types) == len(default)
    if not fits or any(kind not in _LAYER_TYPES for kind in types):
        raise CheckpointError(
            f"config.json needs layer_types as {len(default)} of {' or '.join(_LAYER_TYPES)}, got {types!r}"
        )
    return tuple(types)


def _check_plain(raw: Mapping[str, Any]) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedArchitectureError(
            f"The checkpoint's weights are quantized by {method!r}, which neither graftlm nor this model decodes. "
            f"Serve the plain checkpoint, with model.quantization to save memory"
        )


def _read_eps(raw: Mapping[str, Any]) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if not is_positive(value) and (value != 0 or isinstance(value, bool)):
        raise CheckpointError(f"config.json needs rms_norm_eps as a number of 0 or more, got {value!r}")
    return float(value)
