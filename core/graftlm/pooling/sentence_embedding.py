"""Reads a checkpoint's embedding defaults from its sentence-transformers files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from graftlm.checkpoint.json_files import named_file, read_json_value
from graftlm.errors import CheckpointError

__all__ = ["EmbeddingDefaults", "read_embedding_defaults"]

_MODULES: Final = "modules.json"

#: Name of a pooling in the checkpoint's files -> its name in requests.
_WAYS: Final[Mapping[str, str]] = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last", "last": "last"}


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """Default parameters of embeddings.

    Attributes:
        pooling: "mean" or "last".
        normalize: whether vectors are scaled to unit length.
        obstacle: reason why the checkpoint's pooling is not supported; None if it is supported.
    """

    pooling: str = "mean"
    normalize: bool = True
    obstacle: str | None = None


def read_embedding_defaults(path: Path) -> EmbeddingDefaults:
    """Read modules.json and its pooling configuration. Without the file, the defaults are mean pooling and unit length.

    Raises:
        CheckpointError: a file is malformed.
    """
    file = path / _MODULES
    if not file.is_file():
        return EmbeddingDefaults()
    modules = read_json_value(file)
    if not isinstance(modules, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules
    ):
        raise CheckpointError(f"{file} must be a list of modules with their types, got {str(modules)[:200]}")
    kinds = {module["type"].rpartition(".")[2]: module for module in modules}
    strange = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    way = _pooling_mode(path, kinds["Pooling"]) if "Pooling" in kinds else "mean_tokens"
    obstacle = _obstacle(strange, way)
    return EmbeddingDefaults(_WAYS.get(way, "mean"), "Normalize" in kinds, obstacle)


def _obstacle(strange: list[str], way: str) -> str | None:
    if strange:
        return f"its embeddings use a module {strange[0]!r}, which is not supported"
    if way in _WAYS:
        return None
    why = ": in a causal model, the first token attends to no other token" if "cls" in way else ""
    return f"its embeddings are pooled by {way!r}{why}"


def _pooling_mode(path: Path, module: Mapping[str, Any]) -> str:
    """Return the enabled pooling mode; several modes are joined by commas."""
    name = module.get("path") or ""
    folder = path if name == "" else named_file(path, name, f"{path / _MODULES}: path")
    file = folder / "config.json"
    config = read_json_value(file)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must be a JSON object, got {type(config).__name__}")
    if isinstance(config.get("pooling_mode"), str):
        return str(config["pooling_mode"])
    prefix = "pooling_mode_"
    return ", ".join(sorted(key.removeprefix(prefix) for key, on in config.items() if key.startswith(prefix) and on))
