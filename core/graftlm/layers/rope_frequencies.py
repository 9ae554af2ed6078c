"""Reads the frequencies of rotary position embedding from a checkpoint's config.json.

Keys are cached after rotation and shared by requests, so one set of frequencies serves all requests of an engine, at
all lengths. Two rope types of Transformers change their frequencies with the length of the text:

- dynamic changes them beyond max_position_embeddings. Requests never exceed this limit, and within it dynamic equals
  the default type.
- longrope changes them beyond the context of the first training. If `model.context_len` is within that context, results
  equal those of Transformers. Otherwise all texts use the frequencies of long texts. Texts beyond the first context
  then have the results of Transformers. The results of shorter texts are close to those of Transformers, but not equal.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers.decoder_shape import is_positive

__all__ = ["Frequencies", "rope_frequencies"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Frequencies:
    """The speed of rotation of each pair of dimensions.

    Attributes:
        inv_freq: float32 [R / 2], radians per position.
        scaling: factor of cosines and sines.
        axes: the axis of positions [3, T] that rotates each pair of dimensions, R / 2 numbers from 0 to 2; None: all
            axes have the same positions.
    """

    inv_freq: Tensor
    scaling: float = 1.0
    axes: tuple[int, ...] | None = None


def rope_frequencies(
    config: ModelConfig,
    head_dim: int,
    rope: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
    context_len: int | None = None,
    default_theta: float = 10_000.0,
) -> Frequencies:
    """Read the frequencies from `rope_parameters` of config.json, or from the older `rope_scaling` and `rope_theta`.

    Args:
        config: the checkpoint's configuration.
        head_dim: D.
        rope: parameters of one type of layers, if types differ: `rope_theta`, and those that `rope_type` needs.
        partial: whether the architecture supports `partial_rotary_factor`, the share of a head's rotated dimensions.
        context_len: maximum number of tokens of a request; None: config.max_position_embeddings.
        default_theta: `rope_theta` if it is missing in config.json.

    Raises:
        CheckpointError: a parameter of the rope type is missing or not a number, or the parameters are inconsistent.
        UnsupportedArchitectureError: there is no such rope type, or the architecture has no partial rotation.
    """
    rope = _with_type(_rope_parameters(config, default_theta) if rope is None else rope)
    rope_type = rope["rope_type"]
    if rope_type not in _SCALINGS:
        raise UnsupportedArchitectureError(
            f"config.json has rope_type {rope_type!r}, which is not supported. Available: "
            f"{', '.join(sorted(_SCALINGS))}"
        )
    rotary_dim = _rotary_dim(rope, head_dim, partial)
    theta = _number(rope, "rope_theta", above=1)  # with 1, all pairs of dimensions would rotate at the same speed
    period = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)
    frequencies = _SCALINGS[rope_type](_Rope(rope, period, config, context_len or config.max_position_embeddings))
    _check_finite(frequencies, rope)
    return replace(frequencies, axes=_axes(rope, len(period))) if rope.get("mrope_section") else frequencies


@dataclass(frozen=True, slots=True)
class _Rope:
    """The values from which a rope type computes its frequencies.

    Attributes:
        parameters: rope parameters of config.json.
        period: float32 [R / 2], positions per radian before any scaling.
        config: the checkpoint's configuration.
        context_len: maximum number of tokens of a request.
    """

    parameters: Mapping[str, Any]
    period: Tensor
    config: ModelConfig
    context_len: int

    def number(self, name: str) -> float:
        """Read a parameter; see `_number`."""
        return _number(self.parameters, name)

    def number_or(self, name: str, default: float) -> float:
        """Read a parameter; return the default if it is absent, null or 0."""
        return self.number(name) if self.parameters.get(name) else default

    def original_context(self) -> float:
        """Return the context length before stretching; an entry outside the rope parameters has precedence.

        The length is above 1, because its logarithm is a divisor.
        """
        name = "original_max_position_embeddings"
        value = self.config.raw.get(name) or self.parameters.get(name) or self.config.max_position_embeddings
        return _number({**self.parameters, name: value}, name, above=1)

    def stretched_context(self) -> float:
        """Return the context length after stretching."""
        name = "max_position_embeddings"
        return _number({**self.parameters, name: self.config.max_position_embeddings}, name)


def _rope_parameters(config: ModelConfig, default_theta: float) -> dict[str, Any]:
    raw = config.raw
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json's rope parameters must be an object, got {rope!r}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedArchitectureError(
            "config.json gives rope parameters per layer type; only one set is supported"
        )
    outer = {"rope_theta": raw.get("rope_theta") or default_theta}
    if raw.get("partial_rotary_factor") is not None:
        outer["partial_rotary_factor"] = raw["partial_rotary_factor"]
    return {**outer, **rope}


def _rotary_dim(rope: Mapping[str, Any], head_dim: int, partial: bool) -> int:
    """Return R, the number of rotated dimensions of a head."""
    if rope.get("partial_rotary_factor") in (None, 1, 1.0):
        return head_dim
    factor = _number(rope, "partial_rotary_factor")
    if not partial:
        raise UnsupportedArchitectureError(
            f"config.json has partial_rotary_factor {factor!r}, but this architecture rotates all dimensions of a head"
        )
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json's partial_rotary_factor {factor!r} of a head_dim of {head_dim} is {rotary_dim} dimensions; "
            f"expected an even number up to {head_dim}"
        )
    return rotary_dim


def _with_type(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Add `rope_type`, which is `type` in older files; in Phi-3's first files, the name of longrope is su or yarn."""
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(rope_type, str):
        raise CheckpointError(f"config.json needs rope_type as a text, got {rope_type!r}")
    rope_type = "default" if rope_type == "mrope" else rope_type  # the name in Qwen2-VL's first files
    return {**rope, "rope_type": "longrope" if rope.get("long_factor") and rope_type in ("su", "yarn") else rope_type}


def _axes(rope: Mapping[str, Any], num_pairs: int) -> tuple[int, ...]:
    """Return the axis of each pair of dimensions: consecutive sections for time, height and width.

    Raises:
        CheckpointError: the sections do not have the size of a head.
    """
    sections = rope["mrope_section"]
    is_list = isinstance(sections, Sequence) and all(isinstance(size, int) and size >= 0 for size in sections)
    if not is_list or sum(sections) != num_pairs:
        raise CheckpointError(
            f"config.json needs mrope_section as whole numbers with sum {num_pairs}, got {sections!r}"
        )
    return tuple(i % 3 for i, size in enumerate(sections) for _ in range(size))


def _number(rope: Mapping[str, Any], name: str, above: int = 0) -> float:
    """Read a number above 0 or 1 within the range of float32."""
    value = rope.get(name)
    if not is_positive(value) or value <= above:
        raise CheckpointError(
            f"config.json's rope_type {rope['rope_type']!r} needs {name} as a number above {above}, got {value!r}"
        )
    return value


def _out_of_order(rope: _Rope, needed: str) -> CheckpointError:
    """Return the error for two limits of the blended range that are in the wrong order."""
    return CheckpointError(f"config.json's rope_type {rope.parameters['rope_type']!r} needs {needed}")


def _check_finite(frequencies: Frequencies, rope: Mapping[str, Any]) -> None:
    """Refuse parameters whose frequencies are outside the range of float32."""
    inv_freq = frequencies.inv_freq
    if not (inv_freq.isfinite() & (inv_freq > 0)).all() or not is_positive(frequencies.scaling):
        raise CheckpointError(f"config.json's rope parameters give no finite frequencies above 0: {dict(rope)!r}")


# The operations below have Hugging Face's order: at far positions, rounding of a frequency changes the angle visibly.


def _default(rope: _Rope) -> Frequencies:
    return Frequencies(1.0 / rope.period)


def _linear(rope: _Rope) -> Frequencies:
    """Divide positions by the factor (arXiv:2306.15595)."""
    return Frequencies(1.0 / rope.period / rope.number("factor"))


def _llama3(rope: _Rope) -> Frequencies:
    """Stretch long wavelengths by the factor, leave short ones unchanged, and interpolate in between (Llama 3.1)."""
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise _out_of_order(rope, f"low_freq_factor below high_freq_factor, got {low!r} and {high!r}")
    inv_freq = 1.0 / rope.period
    turns = rope.original_context() / (2 * math.pi / inv_freq)  # turns of each pair over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Frequencies((1 - kept) * inv_freq / factor + kept * inv_freq)


def _yarn(rope: _Rope) -> Frequencies:
    """Interpolate by the number of turns over the original context, and scale attention (YaRN, arXiv:2309.00071)."""
    period, original, factor = rope.period, rope.original_context(), rope.number("factor")
    fast, slow = rope.number_or("beta_fast", 32), rope.number_or("beta_slow", 1)
    if fast < slow:
        raise _out_of_order(rope, f"beta_fast no less than beta_slow, got {fast!r} and {slow!r}")
    rotary_dim, theta = 2 * len(period), rope.number("rope_theta")

    def dim_of(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(fast), dim_of(slow)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001  # equal limits give a step instead of a ramp
    kept = 1 - ((torch.arange(len(period), dtype=torch.float32) - low) / width).clamp(0, 1)
    return Frequencies(1.0 / (factor * period) * (1 - kept) + 1.0 / period * kept, _yarn_scaling(rope, factor))


def _yarn_scaling(rope: _Rope, factor: float) -> float:
    if rope.parameters.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def by(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.parameters.get("mscale") and rope.parameters.get("mscale_all_dim"):
        return by(rope.number("mscale")) / by(rope.number("mscale_all_dim"))
    return by(1.0)


def _longrope(rope: _Rope) -> Frequencies:
    """Use one factor per pair of dimensions, from one of two lists (LongRoPE, arXiv:2402.13753); see the module."""
    original = rope.original_context()
    is_long = rope.context_len > original
    if is_long:
        _logger.warning(
            "longrope: all contexts, up to %d tokens, are computed with the frequencies for long texts, so results "
"for contexts of up to %d tokens differ a little from Transformers'. If all contexts are that short, "
"set model.context_len: %d",
            rope.context_len, original, original,
        )  # fmt: skip
    factors = {name: _factors(rope, name) for name in ("short_factor", "long_factor")}
    inv_freq = 1.0 / (factors["long_factor" if is_long else "short_factor"] * rope.period)
    return Frequencies(inv_freq, _longrope_scaling(rope, original))


def _longrope_scaling(rope: _Rope, original: float) -> float:
    if rope.parameters.get("attention_factor") is not None:
        return rope.number("attention_factor")
    has_factor = rope.parameters.get("factor") is not None
    factor = rope.number("factor") if has_factor else rope.stretched_context() / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _factors(rope: _Rope, name: str) -> Tensor:
    """Read a list with one number per pair of dimensions; return float32 [R / 2]."""
    values, expected = rope.parameters.get(name), len(rope.period)
    if not isinstance(values, Sequence) or len(values) != expected or not all(map(is_positive, values)):
        raise CheckpointError(f"config.json's longrope needs {name} as {expected} numbers above 0, got {values!r}")
    return torch.tensor(values, dtype=torch.float32)


_SCALINGS: dict[str, Callable[[_Rope], Frequencies]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
