"""Finds and checks the checkpoint of a draft model, without reading weights."""

from pathlib import Path
from typing import Final

from pydantic import BaseModel

from graftlm.checkpoint import check_same_vocabulary, check_sizes, load_model_config, resolve_checkpoint
from graftlm.config import EngineConfig, KeyPath, Problem, origin_of
from graftlm.contracts import DraftHeadOptions, DraftModelOptions, ModelConfig
from graftlm.errors import ConfigError, ModelError
from graftlm.registry import AUTO, Registry

__all__ = [
    "check_draft_model",
    "draft_head_options",
    "draft_model_options",
    "option_path",
    "option_place",
    "read_draft_checkpoint",
    "unfit_draft_model",
]

_OPTIONS: Final = ("speculation", "drafter", "options")


def draft_model_options(config: EngineConfig, registry: Registry) -> DraftModelOptions | None:
    """Return the options of the configured drafter if they contain a draft model; else None.

    Raises:
        ConfigError, PluginError: the drafter does not exist, or its options are wrong.
    """
    options = _drafter_options(config, registry)
    return options if isinstance(options, DraftModelOptions) else None


def _drafter_options(config: EngineConfig, registry: Registry) -> BaseModel | None:
    drafter = config.speculation.drafter
    if drafter.name is None or drafter.name == AUTO:  # "auto" selects no drafters with a draft model or head
        return None
    provider = registry.find("drafter", drafter.name)
    return registry.options(provider, drafter.options, ".".join(_OPTIONS), config.origins)


def draft_head_options(config: EngineConfig, registry: Registry) -> DraftHeadOptions | None:
    """Return the options of the configured drafter if it has a draft head; else None.

    Raises:
        ConfigError, PluginError: the drafter does not exist, or its options are wrong.
    """
    options = _drafter_options(config, registry)
    return options if isinstance(options, DraftHeadOptions) else None


def read_draft_checkpoint(path: str, served: ModelConfig, served_path: Path) -> tuple[Path, ModelConfig]:
    """Return the path and the configuration of a draft model's checkpoint.

    Args:
        path: path or name of the checkpoint, as in the configuration.
        served, served_path: configuration and checkpoint path of the served model.

    Raises:
        ModelError: there is no checkpoint, its configuration is wrong, or its vocabulary differs from the served
            model's.
    """
    place = resolve_checkpoint(path, ".".join((*_OPTIONS, "path")))
    model_config = load_model_config(place)
    check_same_vocabulary(served, served_path, model_config, place)
    check_sizes(model_config, place)
    return place, model_config


def unfit_draft_model(error: Exception) -> str:
    """Return the error message for a draft model that cannot be used."""
    return f"the draft model cannot be used: {error}"


def option_path(option: str) -> KeyPath:
    """Return the path in the configuration of one of the drafter's options."""
    return (*_OPTIONS, option)


def option_place(config: EngineConfig, option: str) -> str:
    """Return an option's line in the configuration file and its path, for messages."""
    path = option_path(option)
    return str(Problem(path, "", origin_of(path, config.origins)))


def check_draft_model(config: EngineConfig, registry: Registry, served: ModelConfig, served_path: Path) -> None:
    """Check the configured draft model's checkpoint, before any weights are read.

    Raises:
        ConfigError: the checkpoint cannot be used.
    """
    options = draft_model_options(config, registry)
    if options is None:
        return
    try:
        read_draft_checkpoint(options.path, served, served_path)
    except ModelError as error:
        raise ConfigError(f"{option_place(config, 'path')}: {unfit_draft_model(error)}") from error
