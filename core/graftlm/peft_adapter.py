"""Adapters in the format of the `peft` library: adapter_config.json and adapter_model.safetensors, read and checked.

A tensor's name says what it belongs to, past a fixed beginning:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      down, [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      up, [out, r], to be scaled
                     |------- projection, as in the checkpoint -------|
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graftlm.errors import AdapterError
from graftlm.layers.low_rank import LowRankFactors

__all__ = ["AdapterWeights", "read_peft_adapter"]

N = TypeVar("N", int, float)

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEGINNING = "base_model.model."
_TENSOR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_NAMES_SHOWN = 5
_MERGE: Final = "Merge it into the model with `peft`, and serve that."

#: What an adapter may ask for beside two factors a projection, and that would be lost in silence; by its config entry.
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "it is a DoRA adapter, which also rescales the weights' columns",
    "use_qalora": "it is a QA-LoRA adapter, which pools the inputs",
    "use_bdlora": "it is a block-diagonal adapter",
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it changes embeddings of tokens",
    "layer_replication": "it repeats layers of the model",
    "target_parameters": "it changes parameters that are no linear layers",
    "lora_bias": "its factors have biases",
    "fan_in_fan_out": "its weights are transposed",
    "alora_invocation_tokens": "it begins at certain tokens of the prompt only",
    "arrow_config": "it routes between adapters",
    "kasa_config": "it has a third factor",
}
#: Ways to begin training that take a part out of the model's own weights.
_CHANGES_MODEL: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_EMBEDDING_MARK, _MAGNITUDE_MARK = ".lora_embedding_", ".lora_magnitude_vector"


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter as it was read, on the CPU.

    Attributes:
        factors: by the projection's name in the checkpoint; scaled.
        digest: of the factors: equal ones compute the same.
    """

    factors: Mapping[str, LowRankFactors]
    digest: str


class _PeftConfig(BaseModel):
    """The entries of adapter_config.json that change what is computed."""

    model_config = ConfigDict(extra="allow")

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: list[str] | str | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """Return the rank of a module's factors."""
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Return what the product of a module's factors is multiplied by (rsLoRA: arXiv:2312.03732)."""
        alpha, rank = _of_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def names(self, module: str) -> bool:
        """Whether `target_modules` lists a module by name; false where it is a pattern, or left out."""
        targets = self.target_modules if isinstance(self.target_modules, list) else []
        return any(module == target or module.endswith(f".{target}") for target in targets)

    @property
    def covers_all_layers(self) -> bool:
        """Whether nothing takes single layers out of what `target_modules` names."""
        extra = self.model_extra or {}
        return not any(extra.get(name) for name in ("layers_to_transform", "exclude_modules"))


def read_peft_adapter(folder: Path, targets: Mapping[str, tuple[int, int]], max_rank: int) -> AdapterWeights:
    """Read an adapter and check that it fits a model.

    Args:
        targets: the model's projections that adapters may change: name in the checkpoint -> (out, in).
        max_rank: of its factors.

    Raises:
        AdapterError: a file is missing or not what it says, the adapter is of a kind that is not served, or it does
            not fit the model.
    """
    config = _read_config(folder)
    tensors = dict(_read_tensors(folder / _WEIGHTS))
    modules = _modules(folder, tensors)
    unknown = sorted(modules - targets.keys())
    if unknown:
        raise AdapterError(
            f"{folder} adapts {_listed(unknown)}, which this engine does not. It adapts "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in targets}))}, as named in the checkpoint; see "
            "lora.target_modules."
        )
    missing = [name for name in targets if config.names(name) and name not in modules]
    if missing and config.covers_all_layers:
        raise AdapterError(f"{folder / _WEIGHTS} lacks the factors of {_listed(missing)}, which {_CONFIG} names")
    factors = {name: _factors(folder, tensors, name, targets[name], config, max_rank) for name in sorted(modules)}
    return AdapterWeights(factors, _digest(factors))


def _read_config(folder: Path) -> _PeftConfig:
    file = folder / _CONFIG
    if not folder.is_dir():
        raise AdapterError(f"No adapter at {str(folder)!r}: a folder with {_CONFIG} and {_WEIGHTS} was expected")
    try:
        config = _PeftConfig.model_validate_json(file.read_bytes())
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise AdapterError(f"{file} is not a LoRA adapter's: {place}{': ' if place else ''}{first['msg']}") from error
    _check_kind(file, config)
    return config


def _check_kind(file: Path, config: _PeftConfig) -> None:
    """Refuse what two factors a projection cannot say."""
    if config.peft_type != "LORA":
        raise AdapterError(f"{file}: peft_type is {config.peft_type!r}, only LORA can be served")
    extra: Mapping[str, Any] = config.model_extra or {}
    for name, reason in _REFUSED.items():
        if extra.get(name):
            raise AdapterError(
                f"{file}: {name} is {extra[name]!r}: {reason}, which is not supported. Merge it instead."
            )
    if config.bias != "none":
        raise AdapterError(
            f"{file}: bias is {config.bias!r}: it changes biases, which is not supported. Merge it instead."
        )
    begun = config.init_lora_weights
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_MODEL):
        raise AdapterError(
            f"{file}: init_lora_weights is {begun!r}: the adapter was trained on changed weights of the model. Save it "
            "with path_initial_model_for_weight_conversion, which makes it one for the unchanged model."
        )
    if config.r < 1:
        raise AdapterError(f"{file}: r must be at least 1, got {config.r}")


def _read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if not file.is_file():
        raise AdapterError(f"No weights in {file.parent}: looked for {file.name}; pickled ones (.bin) are not read")
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is truncated or not a safetensors file: {error}") from error


def _modules(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the modules that tensors belong to; every tensor is one of two factors."""
    modules = set()
    for name in tensors:
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or not name.startswith(_BEGINNING):
            raise AdapterError(f"{folder / _WEIGHTS} holds {name!r}: {_why_strange(name)}")
        modules.add(match["module"].removeprefix(_BEGINNING))
    if not modules:
        raise AdapterError(f"{folder / _WEIGHTS} holds no tensors")
    return modules


def _why_strange(name: str) -> str:
    if _EMBEDDING_MARK in name:
        return "adapters of embeddings are not supported"
    if _MAGNITUDE_MARK in name:
        return "it is a DoRA adapter, which is not supported"
    return f"a tensor of a linear layer's adapter was expected, such as {_BEGINNING}....q_proj.lora_A.weight"


def _factors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    module: str,
    shape: tuple[int, int],
    config: _PeftConfig,
    max_rank: int,
) -> LowRankFactors:
    rank, (out_features, in_features) = config.rank(module), shape
    if rank > max_rank:
        raise AdapterError(f"{folder}: {module} has rank {rank}, this engine takes {max_rank}. Raise lora.max_rank.")
    down = _tensor(folder, tensors, f"{_BEGINNING}{module}.lora_A.weight", (rank, in_features))
    up = _tensor(folder, tensors, f"{_BEGINNING}{module}.lora_B.weight", (out_features, rank))
    return LowRankFactors(down.contiguous(), (up.float() * config.scale(module)).contiguous())


def _tensor(folder: Path, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise AdapterError(f"{folder / _WEIGHTS} lacks {name!r}")
    if tuple(tensor.shape) != shape:
        raise AdapterError(
            f"{folder / _WEIGHTS}: {name!r} has shape {list(tensor.shape)}, expected {list(shape)} by this model and "
            f"{_CONFIG}. Is it an adapter of another model?"
        )
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
        raise AdapterError(f"{folder / _WEIGHTS}: {name!r} must hold finite floating-point numbers, is {tensor.dtype}")
    return tensor


def _of_pattern(pattern: Mapping[str, N] | None, module: str, default: N) -> N:
    """Return the value of the first regular expression that a module's name ends with, as `peft` looks it up."""
    for key, value in (pattern or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error as error:
            raise AdapterError(f"{_CONFIG}: {key!r} is not a regular expression: {error}") from error
    return default


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
