"""Checks that this machine has what a configuration needs: checkpoint, device, adapters, packages, storage."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from graftlm.assembly.draft_checkpoint import draft_model_options, option_path, read_draft_checkpoint, unfit_draft_model
from graftlm.chat.configured_tokenizer import read_chat_template
from graftlm.checkpoint import cached_snapshot, is_gguf, is_hub_name, load_model_config, resolve_checkpoint
from graftlm.checkpoint.safetensors_files import SafetensorsFiles
from graftlm.config import EngineConfig, KeyPath, Problem, origin_of, traces_plan
from graftlm.contracts import Options
from graftlm.errors import AdapterError, ConfigError, ModelError, PluginError
from graftlm.lora.peft_config import read_peft_config
from graftlm.registry import AUTO, Registry, probe_platform, selections

__all__ = ["check_files", "check_machine", "must_download"]

_ADAPTER_WEIGHTS = "adapter_model.safetensors"


def check_machine(config: EngineConfig, registry: Registry) -> list[str]:
    """Return what this machine lacks for a configuration, one line per problem.

    This function reads no weights and does not import torch. It must not be used for a configuration of another
    machine.
    """
    return _lines([*_device(config), *_files(config, registry), *_options(config, registry)])


def check_files(config: EngineConfig, registry: Registry) -> list[str]:
    """Return the errors in checkpoints, adapters and packages that would make a start fail, one line each.

    The check takes milliseconds, or up to seconds if the draft model's tokenizer.json differs from the served model's.
    The device is not checked, because torch may find a device that the driver does not report. Problems that do not
    prevent a start, such as a storage that cannot be written, are not checked either.
    """
    return _lines(_files(config, registry))


def _lines(problems: Iterable[Problem]) -> list[str]:
    ordered = sorted(problems, key=lambda problem: problem.origin.line)
    return list(dict.fromkeys(str(problem) for problem in ordered))


def _device(config: EngineConfig) -> Iterator[Problem]:
    if config.model.device == "cuda" and probe_platform("auto").device != "cuda":
        reason = "is 'cuda', but this machine has no CUDA device that the installed torch can use; set auto or cpu"
        yield _problem(config, ("model", "device"), reason)


def _files(config: EngineConfig, registry: Registry) -> list[Problem]:
    return [
        *_checkpoint(config),
        *_chat_template(config),
        *_draft_model(config, registry),
        *_adapters(config),
        *_traces(config),
    ]


def must_download(config: EngineConfig) -> bool:
    """Return whether the checkpoint is only available after a download, which the start does."""
    path = config.model.path
    return config.model.download and is_hub_name(path) and cached_snapshot(path) is None


def _checkpoint(config: EngineConfig) -> Iterator[Problem]:
    where = ("model", "path")
    if must_download(config):
        return
    try:
        path = resolve_checkpoint(config.model.path)
        model_config = load_model_config(path)
        if not is_gguf(path):
            SafetensorsFiles(path)
    except ModelError as error:
        yield _problem(config, where, str(error))
        return
    configured, longest = config.model.context_len, model_config.max_position_embeddings
    if configured is not None and configured > longest:
        reason = f"is {configured:,}, but the context of {config.model.path} has only {longest:,} tokens"
        yield _problem(config, ("model", "context_len"), reason)


def _draft_model(config: EngineConfig, registry: Registry) -> Iterator[Problem]:
    try:
        options = draft_model_options(config, registry)
        path = resolve_checkpoint(config.model.path)
        model_config = load_model_config(path)
    except (ConfigError, PluginError, ModelError):  # reported by other checks
        return
    if options is None:
        return
    try:
        place, _ = read_draft_checkpoint(options.path, model_config, path)
        if not is_gguf(place):
            SafetensorsFiles(place)
    except ModelError as error:
        yield _problem(config, option_path("path"), unfit_draft_model(error))


def _chat_template(config: EngineConfig) -> Iterator[Problem]:
    try:
        read_chat_template(config)
    except ConfigError as error:
        yield _problem(config, ("chat", "template"), str(error).removeprefix("chat.template: "))


def _adapters(config: EngineConfig) -> Iterator[Problem]:
    for name, folder in config.lora.adapters.items():
        where = ("lora", "adapters", name)
        try:
            place = Path(folder).expanduser()
            peft = read_peft_config(place)
            has_weights = (place / _ADAPTER_WEIGHTS).is_file()
        except (AdapterError, OSError, ValueError, RuntimeError) as error:
            yield _problem(config, where, str(error))
            continue
        if not has_weights:
            yield _problem(config, where, f"{place} does not contain {_ADAPTER_WEIGHTS}")
        if peft.r > config.lora.max_rank and not peft.rank_pattern:  # rank_pattern may lower the rank of every module
            yield _problem(config, where, f"has rank {peft.r}, above lora.max_rank {config.lora.max_rank}")


def _traces(config: EngineConfig) -> Iterator[Problem]:
    error = traces_plan(config.server.traces, os.environ).error
    if error is not None:
        name = "enabled" if config.server.traces.endpoint is None else "endpoint"
        yield _problem(config, ("server", "traces", name), error)


def _options(config: EngineConfig, registry: Registry) -> Iterator[Problem]:
    """Yield the problems that the selected providers find in their options. Other code reports wrong provider names."""
    for selection in selections(config):
        options_path = selection.family.options_path
        if options_path is None:
            continue
        try:
            family = selection.family.key
            provider = registry.choose(family) if selection.name == AUTO else registry.find(family, selection.name)
            options = registry.options(provider, selection.options, options_path, config.origins)
        except (ConfigError, PluginError):
            continue
        where = tuple(options_path.split("."))
        try:
            obstacles = list(options.machine_obstacles()) if isinstance(options, Options) else []
        except Exception as error:  # an error in a plugin's code
            yield _problem(config, where, f"the plugin's check of the machine failed: {type(error).__name__}: {error}")
            continue
        for name, reason in obstacles:
            yield _problem(config, (*where, name), reason)


def _problem(config: EngineConfig, path: KeyPath, message: str) -> Problem:
    return Problem(path, message, origin_of(path, config.origins))
