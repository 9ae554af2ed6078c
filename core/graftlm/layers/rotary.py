"""Rotary position embedding (RoFormer, arXiv:2104.09864): the frequencies that a checkpoint asks for, and the rotation.

The two halves of a head are rotated against each other, as Hugging Face's models do:

    out = x * [cos, cos] + roll(x, D / 2) * [-sin, sin]
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers.ops import LayerOps, TorchOps

__all__ = ["Frequencies", "RotaryEmbedding", "Rotation", "rope_frequencies", "rotate"]

_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Frequencies:
    """How fast each pair of dimensions turns.

    Attributes:
        inv_freq: float32 [D / 2], radians per position.
        scaling: multiplies cosines and sines.
    """

    inv_freq: Tensor
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a step's tokens turn, by their positions; unpacks into cosines and sines.

    Attributes:
        cos: [T, 1, D].
        sin: [T, 1, D], the first half negated.
        ops: what multiplies.
    """

    cos: Tensor
    sin: Tensor
    ops: LayerOps

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate [T, heads, D] of any strides; returns it contiguous."""
        return self.ops.rotate(heads, self.cos, self.sin)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.cos, self.sin))


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a step's positions, computed once a step for all layers.

    They are computed, not looked up: that costs a few microseconds a step, and a table for a context of a million
    tokens would cost half a gigabyte.

    Args:
        frequencies: of the checkpoint, from `rope_frequencies`.
        device: of the positions.
        dtype: of queries and keys. Angles are float32 whatever it is.
    """

    inv_freq: Tensor
    sign: Tensor

    def __init__(self, frequencies: Frequencies, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._scaling = frequencies.scaling
        self._dtype = dtype
        self.ops: LayerOps = TorchOps()
        ones = torch.full_like(frequencies.inv_freq, frequencies.scaling)
        inv_freq = torch.cat([frequencies.inv_freq, frequencies.inv_freq]).to(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("sign", torch.cat([-ones, ones]).to(device), persistent=False)

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that rotate."""
        self.ops = ops

    def forward(self, positions: Tensor) -> Rotation:
        """Return the rotation of int64 [T] positions."""
        angles = positions.view(-1, 1, 1) * self.inv_freq
        cos = angles.cos()
        if self._scaling != 1.0:
            cos *= self._scaling
        return Rotation(cos.to(self._dtype), (angles.sin_() * self.sign).to(self._dtype), self.ops)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, D] by cosines and sines with PyTorch's operations; a `Rotation` takes the device's fastest."""
    return TorchOps().rotate(x, cos, sin)


def rope_frequencies(config: ModelConfig, head_dim: int, rope: Mapping[str, Any] | None = None) -> Frequencies:
    """Read the frequencies from config.json: from `rope_parameters`, or the older `rope_scaling` and `rope_theta`.

    Args:
        config: of the checkpoint.
        head_dim: D.
        rope: the parameters of one type of layers, where types differ: `rope_theta`, and what `rope_type` needs.

    Raises:
        CheckpointError: a parameter of the rope type is missing or not a number.
        UnsupportedArchitectureError: the rope type is not one that can be served exactly.
    """
    rope = _with_type(_rope_parameters(config) if rope is None else rope)
    rope_type = rope["rope_type"]
    if rope_type not in _SCALINGS:
        raise UnsupportedArchitectureError(
            f"config.json asks for rope_type {rope_type!r}. Available: {', '.join(sorted(_SCALINGS))}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedArchitectureError(
            f"config.json asks for partial_rotary_factor {rope['partial_rotary_factor']!r}; only 1.0 can be served"
        )
    theta = _number(rope, "rope_theta")
    period = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    return _SCALINGS[rope_type](rope, period, config)


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    raw = config.raw
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json's rope parameters must be an object, got {rope!r}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedArchitectureError(
            "config.json gives rope parameters per layer type; only one set is supported"
        )
    outer = {"rope_theta": raw.get("rope_theta") or _DEFAULT_THETA}
    if raw.get("partial_rotary_factor") is not None:
        outer["partial_rotary_factor"] = raw["partial_rotary_factor"]
    return {**outer, **rope}


def _with_type(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Name the rope type, which older files call `type`."""
    return {**rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _number(rope: Mapping[str, Any], name: str) -> float:
    value = rope.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(
            f"config.json's rope_type {rope['rope_type']!r} needs {name} as a number above 0, got {value!r}"
        )
    return value


# Below, `period` is float32 [D / 2], positions per radian, and the order of operations is Hugging Face's: at far
# positions a rounding of the frequency is a visible angle.


def _default(rope: Mapping[str, Any], period: Tensor, config: ModelConfig) -> Frequencies:
    return Frequencies(1.0 / period)


def _linear(rope: Mapping[str, Any], period: Tensor, config: ModelConfig) -> Frequencies:
    """Positions are divided by the factor (arXiv:2306.15595)."""
    return Frequencies(1.0 / period / _number(rope, "factor"))


def _llama3(rope: Mapping[str, Any], period: Tensor, config: ModelConfig) -> Frequencies:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between are blended."""
    factor, low, high = (_number(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    inv_freq = 1.0 / period
    turns = _original_context(rope, config) / (2 * math.pi / inv_freq)  # over the context it was trained on
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Frequencies((1 - kept) * inv_freq / factor + kept * inv_freq)


def _yarn(rope: Mapping[str, Any], period: Tensor, config: ModelConfig) -> Frequencies:
    """YaRN (arXiv:2309.00071): blends by the number of turns over the original context, and scales attention."""
    factor, original = _number(rope, "factor"), _original_context(rope, config)
    head_dim, theta = 2 * len(period), _number(rope, "rope_theta")

    def dim_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(rope.get("beta_fast") or 32), dim_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a step instead of a ramp
    kept = 1 - ((torch.arange(len(period), dtype=torch.float32) - low) / width).clamp(0, 1)
    return Frequencies(1.0 / (factor * period) * (1 - kept) + 1.0 / period * kept, _yarn_scaling(rope, factor))


def _yarn_scaling(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")

    def by(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return by(_number(rope, "mscale")) / by(_number(rope, "mscale_all_dim"))
    return by(1.0)


def _original_context(rope: Mapping[str, Any], config: ModelConfig) -> float:
    """Tokens of context before stretching; an entry beside the rope parameters goes before one inside."""
    name = "original_max_position_embeddings"
    default = {name: config.max_position_embeddings, "rope_type": rope["rope_type"]}
    outer = {name: config.raw[name]} if config.raw.get(name) else {}
    inner = {name: rope[name]} if rope.get(name) else {}
    return _number({**default, **inner, **outer}, name)


_SCALINGS: dict[str, Callable[[Mapping[str, Any], Tensor, ModelConfig], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
