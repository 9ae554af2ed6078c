"""Reads a checkpoint's model configuration, and selects the dtype."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.checkpoint.json_files import read_json
from graftlm.checkpoint.location import is_gguf
from graftlm.checkpoint.quantized import find_weight_format, without_quantization
from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "load_model_config", "torch_dtype"]

#: Values of `model.dtype` besides "auto".
DTYPES = ("float32", "bfloat16", "float16")

#: Names of the maximum context length in the configurations of various architectures.
_CONTEXT_ENTRIES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length")

#: Context length in tokens of state space models without attention, if config.json has none.
_ATTENTION_FREE_CONTEXT = 131_072


def load_model_config(path: Path) -> ModelConfig:
    """Read a checkpoint's model configuration.

    For a checkpoint with a tower for pictures, this is the configuration of its text model; `media` is the whole
    config.json. In a folder, config.json is read, and the end-of-sequence tokens of generation_config.json. The
    metadata of a GGUF file are converted to the original config.json. `raw` has no quantization_config for weights that
    `iter_weights` decodes, because the model gets plain weights.

    Raises:
        CheckpointError: a file is missing or malformed, or lacks an entry.
        UnsupportedArchitectureError: the text model of a multimodal checkpoint has an unknown type, or the quantization
            cannot be decoded.
    """
    if is_gguf(path):
        from graftlm.checkpoint.gguf import load_gguf_config

        raw = load_gguf_config(path)
        return _model_config(raw, _token_ids(raw, path), path)
    file = path / "config.json"
    raw = read_json(file)
    if find_weight_format(path, raw) is not None:
        raw = without_quantization(raw)
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    eos = (*_token_ids(raw, file), *_token_ids(generation, generation_file))
    return _model_config(raw, eos, file)


def _model_config(raw: Mapping[str, Any], eos: tuple[int, ...], file: Path) -> ModelConfig:
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f"{file}: architectures must have at least one class name, got {architectures!r}")
    whole = None
    if "text_config" in raw or "vision_config" in raw:
        from graftlm.checkpoint.text_part import text_config

        whole, (architectures, raw) = raw, text_config(raw, file)
        stated = whole.get("text_config") or whole
        eos = (*eos, *_token_ids(stated if "eos_token_id" in stated or eos else raw, file))
    return ModelConfig(
        architectures=tuple(str(name) for name in architectures),
        vocab_size=_size(raw, "vocab_size", file),
        max_position_embeddings=_context_len(raw, file),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        raw=raw,
        media=whole,
    )


def torch_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """Return the dtype of the model.

    Args:
        name: one of `DTYPES`, or "auto" for the dtype in config.json (float32 if it has none).
        config: the checkpoint's configuration.

    Raises:
        ConfigError: the name is unknown.
        CheckpointError: the name is "auto", and the dtype in config.json is not one of `DTYPES`.
    """
    import torch

    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"Unknown model.dtype {name!r}. Available: auto, {', '.join(DTYPES)}")
    stated = config.raw.get("dtype") or config.raw.get("torch_dtype") or "float32"
    if name == "auto" and stated not in DTYPES:
        raise CheckpointError(
            f"config.json has dtype {stated!r}, which is not supported. Set model.dtype: {', '.join(DTYPES)}"
        )
    dtype: torch.dtype = getattr(torch, stated if name == "auto" else name)
    return dtype


def _size(raw: Mapping[str, Any], name: str, file: Path) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"{file}: {name} must be an integer above 0, got {value!r}")
    return value


def _context_len(raw: Mapping[str, Any], file: Path) -> int:
    """Return the longest context in tokens. State space models without attention have no limit and no such entry."""
    name = _context_entry(raw)
    if raw.get(name) is None and "state_size" in raw and "num_attention_heads" not in raw:
        return _ATTENTION_FREE_CONTEXT
    return _size(raw, name, file)


def _context_entry(raw: Mapping[str, Any]) -> str:
    return next((name for name in _CONTEXT_ENTRIES if name in raw), _CONTEXT_ENTRIES[0])


def _token_ids(raw: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise CheckpointError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
    return ids
