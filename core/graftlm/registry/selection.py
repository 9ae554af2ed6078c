"""Finds the providers that a configuration selects, and checks that all of them are available."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from graftlm.config import EngineConfig, Problem, exposure_errors, exposure_warnings, origin_of
from graftlm.contracts import Drafter, DraftHeadOptions, Provider, StepExecutor
from graftlm.errors import ConfigError, PluginError, ProviderUnavailableError
from graftlm.registry.families import FAMILIES, Family
from graftlm.registry.registry import AUTO, Registry

__all__ = [
    "Findings",
    "Selection",
    "check",
    "circular_fallbacks",
    "configured_drafters",
    "configured_executor",
    "selections",
]

_FIRST: Final = "speculation.first"


@dataclass(frozen=True, slots=True)
class Selection:
    """A provider name that a configuration selects for a family, and its raw options."""

    family: Family
    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of `check`.

    Attributes:
        errors: reasons why no engine can be assembled, one line each.
        warnings: providers that cannot run on this machine, and plugins that failed but are not selected.
    """

    errors: list[str]
    warnings: list[str]


def selections(config: EngineConfig) -> list[Selection]:
    """Return the selections of a configuration, by family."""
    return [
        Selection(family, name, {} if family.options_path is None else _at(config, family.options_path))
        for family in FAMILIES.values()
        if family.name_path is not None and (name := _at(config, family.name_path)) is not None
    ] + [*_storage(config), *_grammar_fallbacks(config), *_first_drafters(config)]


def _storage(config: EngineConfig) -> list[Selection]:
    """Return the storage in a cache's options; the cache checks its other options."""
    storage = config.cache.options.get("storage")
    if not isinstance(storage, Mapping) or not isinstance(storage.get("name"), str):
        return []
    where = "cache.options.storage"
    family = replace(FAMILIES["storage"], name_path=f"{where}.name", options_path=f"{where}.options")
    options = storage.get("options")
    return [Selection(family, storage["name"], options if isinstance(options, Mapping) else {})]


def _grammar_fallbacks(config: EngineConfig) -> list[Selection]:
    """Return the fallback backends in a grammar backend's options."""
    names = config.grammar.options.get("fallback")
    if not isinstance(names, Sequence) or isinstance(names, str):
        return []
    family = replace(FAMILIES["grammar"], name_path="grammar.options.fallback", options_path=None)
    return [Selection(family, name, {}) for name in names if isinstance(name, str)]


def _first_drafters(config: EngineConfig) -> list[Selection]:
    family = replace(FAMILIES["drafter"], name_path=_FIRST, options_path=None)
    return [Selection(family, name, {}) for name in config.speculation.first]


def configured_drafters(config: EngineConfig, registry: Registry) -> list[Provider[Drafter]]:
    """Return the providers of the configured drafters, in the order in which the drafters are called.

    Raises:
        PluginError: there is no provider with a configured name.
        ConfigError: a drafter in `speculation.first` needs an option.
    """
    settings = config.speculation
    if settings.drafter.name is None:
        return []
    if settings.drafter.name == AUTO:
        return [provider for provider in registry.available("drafter") if not _needs_selection(provider)]
    providers = [registry.provider("drafter", name) for name in (*settings.first, settings.drafter.name)]
    for provider in providers[:-1]:
        _check_needs_no_options(provider)
    return providers


def _needs_selection(provider: Provider[Any]) -> bool:
    """Return whether `auto` leaves out a drafter: it needs an option, or a checkpoint with a draft head."""
    return bool(_required_options(provider)) or issubclass(provider.options, DraftHeadOptions)


def configured_executor(config: EngineConfig, registry: Registry) -> Provider[StepExecutor] | None:
    """Return the provider of the configured executor; None: one rank runs in the scheduler's process.

    Raises:
        PluginError: there is no provider with the configured name, or no provider supports the number of ranks.
        ConfigError: the configured executor does not support the number of ranks.
    """
    name, num_ranks = config.parallel.executor, config.parallel.tensor

    def misfit(provider: Provider[StepExecutor]) -> str | None:
        max_ranks = provider.capabilities.max_ranks
        if max_ranks is None or num_ranks <= max_ranks:
            return None
        return f"it runs {max_ranks} rank{'s' if max_ranks > 1 else ''}, but parallel.tensor is {num_ranks}"

    if name == AUTO:
        return None if num_ranks == 1 else registry.choose("executor", fits=misfit)
    provider = registry.provider("executor", name, "parallel.executor")
    reason = misfit(provider)
    if reason is not None:
        raise ConfigError(f"the executor {name!r} cannot be used: {reason}. Set parallel.executor: auto")
    return provider


def _required_options(provider: Provider[Any]) -> list[str]:
    return [name for name, field in provider.options.model_fields.items() if field.is_required()]


def _check_needs_no_options(provider: Provider[Any]) -> None:
    required = _required_options(provider)
    if required:
        raise ConfigError(
            f"{_FIRST}: {provider.name} needs the option {required[0]}, but drafters in first have no options; set "
            f"speculation.drafter to {provider.name}"
        )


def check(config: EngineConfig, registry: Registry) -> Findings:
    """Check all names, options and the exposure to other machines, without loading a model or a tensor library.

    A provider that exists but cannot run on this machine is a warning: the file may be for another machine.
    """
    errors = exposure_errors(config)
    warnings = [str(failure) for failure in registry.failures] + exposure_warnings(config)
    for selection in selections(config):
        try:
            provider, warning = _resolve(selection, config, registry)
            if provider is not None and selection.family.name_path == _FIRST:
                _check_needs_no_options(provider)
                continue
            if warning is not None:
                warnings.append(warning)
            if provider is not None and selection.family.options_path is not None:
                registry.options(provider, selection.options, selection.family.options_path, config.origins)
        except (ConfigError, PluginError) as error:
            errors += _located(error, selection, config)
    return Findings(errors + circular_fallbacks(config, registry), warnings)


def circular_fallbacks(config: EngineConfig, registry: Registry) -> list[str]:
    """Return an error if the grammar backend is its own fallback: one line or none."""
    default, path = config.grammar.name, ("grammar", "options", "fallback")
    if default == AUTO:
        available = registry.available("grammar")
        default = available[0].name if available else AUTO
    if not any(fallback.name == default for fallback in _grammar_fallbacks(config)):
        return []
    message = f"{default} cannot fall back to itself; remove it"
    return [str(Problem(path, message, origin_of(path, config.origins)))]


def _resolve(selection: Selection, config: EngineConfig, registry: Registry) -> tuple[Provider[Any] | None, str | None]:
    """Return (provider or None if the checkpoint decides, warning or None)."""
    family = selection.family
    if family.key == "executor":
        return configured_executor(config, registry), None
    if selection.name != AUTO:
        provider = registry.find(family.key, selection.name, family.name_path)
        why = registry.why_not(provider)
        return provider, f"{family.title} '{selection.name}' cannot run on this machine: {why}" if why else None
    if family.key == "model":
        return None, None  # the checkpoint decides
    try:
        return registry.choose(family.key), None
    except ProviderUnavailableError as error:
        if not registry.names(family.key) and not family.is_optional:
            raise
        return None, None if family.is_optional else str(error)


def _located(error: PluginError | ConfigError, selection: Selection, config: EngineConfig) -> list[str]:
    """Return an error's lines; an error about a name has the name's place in the configuration."""
    if not isinstance(error, PluginError) or selection.family.name_path is None:
        return str(error).splitlines()
    path = tuple(selection.family.name_path.split("."))
    return [str(Problem(path, str(error), origin_of(path, config.origins)))]


def _at(config: EngineConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
