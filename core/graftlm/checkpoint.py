"""A checkpoint on disk: where it lies, what its config.json says, and its tensors, one at a time.

Torch is imported by the functions that make tensors, so that a command line can read a configuration without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError, ConfigError, UnsupportedArchitectureError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["DTYPES", "iter_weights", "load_model_config", "resolve_checkpoint", "torch_dtype"]

#: What `model.dtype` may say, besides "auto".
DTYPES = ("float32", "bfloat16", "float16")

_DEMO = "demo"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

#: What configurations of various architectures call their longest context.
_CONTEXT_ENTRIES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length")


def resolve_checkpoint(path: str) -> Path:
    """Return the folder that a configuration's `model.path` means: "demo", or a folder on this machine.

    Raises:
        CheckpointError: there is no such folder, or it has no config.json.
    """
    if path == _DEMO:
        from graftlm.demo import demo_checkpoint

        folder = demo_checkpoint()
    else:
        folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"No checkpoint at {path!r}: looked for the folder {folder.absolute()}. model.path is 'demo' or a folder "
            f"with config.json and {_WEIGHTS}; a model on a hub has to be downloaded first"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"No checkpoint in {folder}: looked for config.json, found {_listing(folder)}")
    return folder


def load_model_config(path: Path) -> ModelConfig:
    """Read a checkpoint folder's config.json, and the end-of-sequence tokens of generation_config.json.

    Raises:
        CheckpointError: a file is missing, is not JSON, or lacks an entry.
        UnsupportedArchitectureError: it is a model of more than text.
    """
    file = path / "config.json"
    raw = _read_json(file)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f"{file}: architectures must name at least one class, got {architectures!r}")
    if "vocab_size" not in raw and isinstance(raw.get("text_config"), Mapping):
        raise UnsupportedArchitectureError(
            f"{file}: {architectures[0]} keeps the language model's sizes in text_config, as models of images and text "
            f"do; only checkpoints of text models can be served"
        )
    generation_file = path / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    eos = (*_token_ids(raw, file), *_token_ids(generation, generation_file))
    return ModelConfig(
        architectures=tuple(str(name) for name in architectures),
        vocab_size=_size(raw, "vocab_size", file),
        max_position_embeddings=_size(raw, _context_entry(raw), file),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        raw=raw,
    )


def torch_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """Return the dtype to serve in.

    Args:
        name: one of `DTYPES`, or "auto" for the one that config.json states; float32 when it states none.
        config: of the checkpoint.

    Raises:
        ConfigError: the name is none of these.
        CheckpointError: "auto", and config.json states something else.
    """
    import torch

    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"Unknown model.dtype {name!r}. Available: auto, {', '.join(DTYPES)}")
    stated = config.raw.get("dtype") or config.raw.get("torch_dtype") or "float32"
    if name == "auto" and stated not in DTYPES:
        raise CheckpointError(
            f"config.json states dtype {stated!r}, which cannot be served. Set model.dtype: {', '.join(DTYPES)}"
        )
    dtype: torch.dtype = getattr(torch, stated if name == "auto" else name)
    return dtype


def iter_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Find a checkpoint's safetensors files, and return an iterator over (name, tensor).

    A tensor is on the CPU, read or mapped when it is reached, and need not be kept.

    Raises:
        CheckpointError: a file is missing, truncated, or not what it says. What concerns which files there are is
            raised by the call, the rest while iterating.
    """
    if (path / _WEIGHTS).is_file():
        return _iter_file(path / _WEIGHTS, None)
    if (path / _INDEX).is_file():
        return _iter_shards(path, _read_index(path))
    found = _listing(path)
    hint = "; graftlm reads no pickled weights (.bin, .pt): save the model as safetensors" if ".bin" in found else ""
    raise CheckpointError(f"No weights in {path}: looked for {_WEIGHTS} and {_INDEX}, found {found}{hint}")


def _read_index(path: Path) -> dict[str, list[str]]:
    """Return shard file name -> names of its tensors, having seen that each shard is there."""
    index = path / _INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to files, got {weight_map!r}")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: {name!r} must lie in a file of the same folder, got {shard!r}")
        shards.setdefault(shard, []).append(name)
    missing = sorted(shard for shard in shards if not (path / shard).is_file())
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}, which {_INDEX} names; found {_listing(path)}")
    return shards


def _iter_shards(path: Path, shards: Mapping[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    for shard in sorted(shards):
        yield from _iter_file(path / shard, shards[shard])


def _iter_file(file: Path, expected: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a file; `expected` are the names an index says it holds."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            absent = sorted(set(expected or ()) - set(names))
            if absent:
                raise CheckpointError(f"{file} lacks the tensor {absent[0]!r}, which {_INDEX} says it holds")
            for name in names:
                yield name, tensors.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _size(raw: Mapping[str, Any], name: str, file: Path) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"{file}: {name} must be a whole number above 0, got {value!r}")
    return value


def _context_entry(raw: Mapping[str, Any]) -> str:
    return next((name for name in _CONTEXT_ENTRIES if name in raw), _CONTEXT_ENTRIES[0])


def _token_ids(raw: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise CheckpointError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
    return ids


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") if names else "nothing"
