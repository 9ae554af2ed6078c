"""Determines RoPE parameters from a GGUF file's metadata and tensors of frequency factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.checkpoint.gguf.file import GGUFFile, shortest
from graftlm.errors import UnsupportedArchitectureError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["rope_parameters"]

_THETA = 10_000.0  # the default
_FACTOR, _CONTEXT = "{arch}.rope.scaling.factor", "{arch}.rope.scaling.original_context_length"
_LLAMA3_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
#: Limits of Llama 3's RoPE: frequencies with fewer than _LOW periods in the original context are reduced, and those
#: with more than _HIGH periods are unchanged.
_LOW, _HIGH = 1.0, 4.0
_LLAMA3_CONTEXT = 8192
_MOST_DEVIATION = 1e-3


def rope_parameters(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of config.json.

    Raises:
        UnsupportedArchitectureError: config.json cannot express the file's RoPE scaling.
    """
    theta = file.number("{arch}.rope.freq_base", _THETA)
    scaled = _scaling(file, theta, head_dim) | {"rope_theta": theta}
    if file.architecture != "gemma3":
        return scaled
    local = file.number("{arch}.rope.freq_base_swa", _THETA)
    return {"full_attention": scaled, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    if _LLAMA3_FACTORS in file:
        return _llama3(_floats(file, _LLAMA3_FACTORS), theta, head_dim)
    if _LONG_FACTORS in file:
        return _longrope(file)
    kind = file.get("{arch}.rope.scaling.type")
    match kind:
        case None | "none":
            return {"rope_type": "default"}
        case "linear":
            return {"rope_type": "linear", "factor": file.number(_FACTOR, 1.0)}
        case "yarn":
            context = {"original_max_position_embeddings": file.size(_CONTEXT)} if file.get(_CONTEXT) else {}
            return {"rope_type": "yarn", "factor": file.number(_FACTOR, 1.0), **context}
    raise UnsupportedArchitectureError(f"{file.path} has RoPE scaling {kind!r}, supported are none, linear and yarn")


def _longrope(file: GGUFFile) -> dict[str, Any]:
    scale = "{arch}.rope.scaling.attn_factor"
    return {
        "rope_type": "longrope",
        "long_factor": _floats(file, _LONG_FACTORS),
        "short_factor": _floats(file, _SHORT_FACTORS),
        **({"attention_factor": file.number(scale)} if file.get(scale) else {}),
    }


def _floats(file: GGUFFile, name: str) -> list[float]:
    import torch

    return [shortest(value) for value in file.read(name, torch.float32).tolist()]


def _llama3(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's RoPE scaling from the frequency factors in the file.

    Raises:
        UnsupportedArchitectureError: no parameters produce these factors.
    """
    waves = [2 * math.pi * theta ** (2 * i / head_dim) for i in range(head_dim // 2)]  # wavelengths in tokens
    factor = max(factors)
    context = _original_context(factors, waves, factor)
    expected = [_llama3_factor(wave, factor, context) for wave in waves]
    if len(factors) != len(waves) or not np.allclose(factors, expected, rtol=_MOST_DEVIATION):
        raise UnsupportedArchitectureError(
            "The GGUF file's rope_freqs differ from Llama 3's RoPE scaling, and other frequencies are not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": context,
    }


def _original_context(factors: Sequence[float], waves: Sequence[float], factor: float) -> int:
    """Compute the original context from a factor between 1 and `factor`; if there is none, return Llama 3's context."""
    for found, wave in zip(factors, waves, strict=False):
        if 1.01 < found < 0.99 * factor:
            smooth = (1 / found - 1 / factor) / (1 - 1 / factor)
            return round(wave * (smooth * (_HIGH - _LOW) + _LOW))
    return _LLAMA3_CONTEXT


def _llama3_factor(wave: float, factor: float, context: int) -> float:
    """Return the factor by which a frequency is reduced (Llama 3.1's reference implementation, `apply_scaling`)."""
    smooth = min(max((context / wave - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
