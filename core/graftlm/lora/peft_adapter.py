"""Reads and checks adapters in `peft`'s format: adapter_config.json and adapter_model.safetensors.

A tensor's name has a fixed prefix, the name of a projection and the name of a factor:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      down, [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      up, [out, r], without scale
                     |------- projection, as in the checkpoint -------|
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graftlm.errors import AdapterError
from graftlm.layers.low_rank import LowRankFactors
from graftlm.lora.peft_config import CONFIG_FILE, PeftConfig, read_peft_config

__all__ = ["AdapterWeights", "read_peft_adapter"]

_WEIGHTS = "adapter_model.safetensors"
_BEGINNING = "base_model.model."
_TENSOR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_NAMES_SHOWN = 5
_EMBEDDING_MARK, _MAGNITUDE_MARK = ".lora_embedding_", ".lora_magnitude_vector"


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The factors of an adapter, on the CPU.

    `read_peft_adapter` returns them; `AdapterLoader.install` copies them to a slot on the device.

    Attributes:
        factors: name of the projection in the checkpoint -> factors, scaled, in the layers' dtype and finite.
        digest: digest of the factors; adapters with the same digest give the same results.
    """

    factors: Mapping[str, LowRankFactors]
    digest: str


def read_peft_adapter(
    folder: Path, targets: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """Read an adapter and check that it matches a model.

    Args:
        folder: the adapter's folder; may start with `~`.
        targets: the model's projections that adapters may change, as name in the checkpoint -> (out, in).
        max_rank: maximum rank of the adapter's factors.
        dtype: dtype of the returned factors.

    Raises:
        AdapterError: a file is missing or malformed, this kind of adapter is not supported, or the adapter does not
            match the model.
    """
    try:
        return _read(_expanded(folder), targets, max_rank, dtype)
    except OSError as error:
        raise AdapterError(f"{str(folder)!r:.200} cannot be read: {error.strerror}") from error


def _expanded(folder: Path) -> Path:
    """Return an adapter's folder with `~` expanded."""
    try:
        expanded = folder.expanduser()
    except RuntimeError as error:
        raise AdapterError(f"{str(folder)!r:.200}: {error}") from error
    if not expanded.is_dir():
        raise AdapterError(f"No adapter at {str(folder)!r:.200}: expected a folder with {CONFIG_FILE} and {_WEIGHTS}")
    return expanded


def _read(folder: Path, targets: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    config = read_peft_config(folder)
    tensors = dict(_read_tensors(folder / _WEIGHTS))
    modules = _modules(folder, tensors)
    unknown = sorted(modules - targets.keys())
    if unknown:
        raise AdapterError(
            f"{folder} adapts {_listed(unknown)}, which this engine does not support. Supported (names in the "
            f"checkpoint): {', '.join(sorted({name.rpartition('.')[2] for name in targets}))}; see lora.target_modules."
        )
    missing = [name for name in targets if config.names(name) and name not in modules]
    if missing and config.covers_all_layers:
        raise AdapterError(f"{folder / _WEIGHTS} lacks the factors of {_listed(missing)}, which {CONFIG_FILE} lists")
    factors = {
        name: _factors(folder, tensors, name, targets[name], config, max_rank, dtype) for name in sorted(modules)
    }
    return AdapterWeights(factors, _digest(factors))


def _read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if not file.is_file():
        raise AdapterError(
            f"No weights in {file.parent}: expected {file.name}; pickled weights (.bin) are not supported"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is truncated or not a safetensors file: {error}") from error


def _modules(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the modules of the tensors; each tensor must be one of a module's two factors."""
    modules = set()
    for name in tensors:
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or not name.startswith(_BEGINNING):
            raise AdapterError(f"{folder / _WEIGHTS} has {name!r}: {_unsupported_reason(name)}")
        modules.add(match["module"].removeprefix(_BEGINNING))
    if not modules:
        raise AdapterError(f"{folder / _WEIGHTS} has no tensors")
    return modules


def _unsupported_reason(name: str) -> str:
    if _EMBEDDING_MARK in name:
        return "adapters of embeddings are not supported"
    if _MAGNITUDE_MARK in name:
        return "it is a DoRA adapter, which is not supported"
    return f"expected a tensor of a linear layer's adapter, such as {_BEGINNING}....q_proj.lora_A.weight"


def _factors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    module: str,
    shape: tuple[int, int],
    config: PeftConfig,
    max_rank: int,
    dtype: torch.dtype,
) -> LowRankFactors:
    rank, (out_features, in_features) = config.rank(module), shape
    if rank > max_rank:
        raise AdapterError(f"{folder}: {module} has rank {rank}, the maximum is {max_rank}. Increase lora.max_rank.")
    beginning = f"{_BEGINNING}{module}.lora_"
    down = _tensor(folder, tensors, f"{beginning}A.weight", (rank, in_features))
    up = _tensor(folder, tensors, f"{beginning}B.weight", (out_features, rank))
    scale = config.scale(module)
    scaled = LowRankFactors(down.to(dtype).contiguous(), (up.float() * scale).to(dtype).contiguous())
    for factor, values, times in (("A", scaled.down, ""), ("B", scaled.up, f" times {scale:g}")):
        if not bool(torch.isfinite(values).all()):
            raise AdapterError(
                f"{folder / _WEIGHTS}: '{beginning}{factor}.weight'{times} is not finite in {dtype}, the model's dtype"
            )
    return scaled


def _tensor(folder: Path, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise AdapterError(f"{folder / _WEIGHTS} lacks {name!r}")
    if tuple(tensor.shape) != shape:
        raise AdapterError(
            f"{folder / _WEIGHTS}: {name!r} has shape {list(tensor.shape)}, expected {list(shape)} from this model and "
            f"{CONFIG_FILE}. Check that the adapter was trained for this model."
        )
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
        raise AdapterError(f"{folder / _WEIGHTS}: {name!r} must have finite floating-point numbers, got {tensor.dtype}")
    return tensor


def _digest(factors: Mapping[str, LowRankFactors]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, pair in factors.items():
        for tensor in (pair.down, pair.up):
            hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            hasher.update(tensor.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
