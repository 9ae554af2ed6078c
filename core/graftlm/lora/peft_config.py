"""Reads `peft`'s adapter_config.json, and refuses features that are not supported."""

import logging
import math
import stat
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from graftlm.errors import AdapterError
from graftlm.lora.module_patterns import ModulePatterns

__all__ = ["CONFIG_FILE", "PeftConfig", "read_peft_config"]

_logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
_MAX_CONFIG_BYTES = 4 << 20
_NAMES_SHOWN = 5

#: Unsupported features, which would otherwise be ignored silently: config entry -> reason.
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "it is a DoRA adapter, which also rescales the weights' columns",
    "use_qalora": "it is a QA-LoRA adapter, which pools the inputs",
    "use_bdlora": "it is a block-diagonal adapter",
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it changes embeddings of tokens",
    "layer_replication": "it repeats layers of the model",
    "target_parameters": "it changes parameters that are not linear layers",
    "lora_bias": "its factors have biases",
    "fan_in_fan_out": "its weights are transposed",
    "alora_invocation_tokens": "it is active only after certain tokens of the prompt",
    "arrow_config": "it routes between adapters",
    "kasa_config": "it has a third factor",
}
#: Initializations that subtract a part of the model's weights.
_CHANGES_MODEL: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Entries without effect on the computation: the adapter's origin, its training, and the modules with factors, which
#: are also in the tensors' names.
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_config"),
        *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
        *("runtime_config", "qalora_group_size", "ensure_weight_tying"),
    }
)

Rank = Annotated[int, Field(ge=1, le=1 << 20)]


class PeftConfig(BaseModel):
    """The entries of adapter_config.json that affect the computation."""

    model_config = ConfigDict(extra="allow")

    peft_type: str
    r: Rank
    lora_alpha: FiniteFloat
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    target_modules: list[str] | str | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """Return the rank of a module's factors."""
        rank = self._ranks.find(module)
        return self.r if rank is None else rank

    def scale(self, module: str) -> float:
        """Return the scale of the product of a module's factors (rsLoRA: arXiv:2312.03732)."""
        rank, alpha = self.rank(module), self._alphas.find(module)
        return (self.lora_alpha if alpha is None else alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def names(self, module: str) -> bool:
        """Return whether `target_modules` lists a module by name; False if it is a pattern or missing."""
        targets = self.target_modules if isinstance(self.target_modules, list) else []
        return any(module == target or module.endswith(f".{target}") for target in targets)

    @property
    def covers_all_layers(self) -> bool:
        """Whether no entry excludes single layers from `target_modules`."""
        extra = self.model_extra or {}
        return not any(extra.get(name) for name in ("layers_to_transform", "exclude_modules"))

    @cached_property
    def _ranks(self) -> ModulePatterns[int]:
        return ModulePatterns(self.rank_pattern or {}, f"{CONFIG_FILE}: rank_pattern")

    @cached_property
    def _alphas(self) -> ModulePatterns[float]:
        return ModulePatterns(self.alpha_pattern or {}, f"{CONFIG_FILE}: alpha_pattern")


def read_peft_config(folder: Path) -> PeftConfig:
    """Read and check the configuration in an adapter's folder; unknown entries are logged as a warning.

    Raises:
        AdapterError: the file is missing or malformed, or needs more than two factors per projection.
    """
    file = folder / CONFIG_FILE
    try:
        config = PeftConfig.model_validate_json(_content(file))
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place:.200}{': ' if place else ''}{first['msg']}"
        raise AdapterError(f"{file} is not the configuration of a LoRA adapter: {reason}") from error
    _check_kind(file, config)
    _warn_of_unknown_entries(file, config.model_extra or {})
    return config


def _content(file: Path) -> bytes:
    """Return the content of a regular file; other files, such as pipes, are refused: reading them may never end."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise AdapterError(f"{file} is not a regular file")
    if status.st_size > _MAX_CONFIG_BYTES:
        raise AdapterError(f"{file} has {status.st_size} bytes, expected at most {_MAX_CONFIG_BYTES}")
    return file.read_bytes()


def _check_kind(file: Path, config: PeftConfig) -> None:
    """Refuse adapters that need more than two factors per projection."""
    if config.peft_type != "LORA":
        raise AdapterError(f"{file}: peft_type is {config.peft_type!r:.200}, only LORA is supported")
    extra: Mapping[str, Any] = config.model_extra or {}
    for name, reason in _REFUSED.items():
        if extra.get(name):
            raise AdapterError(
                f"{file}: {name} is {extra[name]!r:.200}: {reason}, which is not supported. Merge the adapter into the "
                "model instead."
            )
    if config.bias != "none":
        raise AdapterError(
            f"{file}: bias is {config.bias!r:.200}: it changes biases, which is not supported. Merge the adapter into "
            "the model instead."
        )
    begun = config.init_lora_weights
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_MODEL):
        raise AdapterError(
            f"{file}: init_lora_weights is {begun!r:.200}: the adapter was trained on changed weights of the model. "
            "Save it with path_initial_model_for_weight_conversion, which converts it for the unchanged model."
        )


def _warn_of_unknown_entries(file: Path, extra: Mapping[str, Any]) -> None:
    unknown = sorted(name for name, value in extra.items() if value and name not in _WITHOUT_EFFECT)
    if unknown:
        shown = ", ".join(f"{name:.80}" for name in unknown[:_NAMES_SHOWN])
        more = len(unknown) - _NAMES_SHOWN
        _logger.warning(
            "%s: unknown entries are ignored: %s%s. If they affect the adapter's computation, merge the adapter into "
            "the model with `peft` and serve the merged model.",
            file, shown, f" and {more} more" if more > 0 else "",
        )  # fmt: skip
    _logger.debug("%s: trained on %s", file, extra.get("base_model_name_or_path"))
