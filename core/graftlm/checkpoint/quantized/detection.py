"""Detects the format of a checkpoint's quantized weights from its configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftlm.checkpoint.json_files import read_json
from graftlm.checkpoint.quantized.awq import AwqFormat
from graftlm.checkpoint.quantized.compressed_tensors import CompressedTensorsFormat
from graftlm.checkpoint.quantized.fp8 import Fp8Format
from graftlm.checkpoint.quantized.gptq import GptqFormat
from graftlm.checkpoint.quantized.weight_format import WeightFormat
from graftlm.errors import CheckpointError

__all__ = ["FORMATS", "find_weight_format", "without_quantization"]

#: quant_method -> format.
FORMATS: Mapping[str, type[WeightFormat]] = {
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fp8": Fp8Format,
    "gptq": GptqFormat,
}
#: Entries of config.json; older versions of compressed-tensors wrote the second one.
_ENTRIES = ("quantization_config", "compression_config")
#: Files that older tools wrote instead of an entry in config.json -> quant_method.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def find_weight_format(folder: Path, raw: Mapping[str, Any] | None = None) -> WeightFormat | None:
    """Return the format of a checkpoint's quantized weights; None if they are plain, or if the model must decode them.

    Args:
        folder: the checkpoint's folder.
        raw: its config.json if it was already read; None: it is read. A folder without config.json has plain weights.

    Raises:
        CheckpointError: the quantization's configuration is malformed.
        UnsupportedArchitectureError: this variant of a format is not supported.
    """
    if raw is None:
        config_file = folder / "config.json"
        raw = read_json(config_file) if config_file.is_file() else {}
    settings = _settings(folder, raw)
    if settings is None:
        return None
    method = settings.get("quant_method")
    weight_format = FORMATS.get(method) if isinstance(method, str) else None
    return None if weight_format is None else weight_format.from_config(settings)


def without_quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the entries of quantization."""
    return {name: value for name, value in raw.items() if name not in _ENTRIES}


def _settings(folder: Path, raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for entry in _ENTRIES:
        settings = raw.get(entry)
        if settings:
            if not isinstance(settings, Mapping):
                raise CheckpointError(f"{folder / 'config.json'}: {entry} must be an object, got {settings!r}")
            return settings
    for name, method in _FILES.items():
        if (folder / name).is_file():
            return {"quant_method": method} | read_json(folder / name)
    return None
