"""The registry of providers, which finds a provider by name, or returns the reason why there is none."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from graftlm.config import KeyPath, Origin, PluginSettings, nearest, problems_in, report
from graftlm.contracts import Platform, Provider
from graftlm.errors import (
    ConfigError,
    DuplicateProviderError,
    GraftlmError,
    PluginError,
    PluginLoadError,
    ProviderUnavailableError,
    UnknownProviderError,
    UnsupportedArchitectureError,
)
from graftlm.registry.families import FAMILIES, Family
from graftlm.registry.hook_trace import HookTrace, trace_of
from graftlm.registry.listeners import Listener, listeners
from graftlm.registry.loading import PluginFailure, PluginLoader, describe_error, import_names
from graftlm.registry.model_choice import model_misfit
from graftlm.registry.offers import Offer, collect

__all__ = ["AUTO", "Candidate", "Entry", "Registry"]

logger = logging.getLogger(__name__)

#: The configured name that lets the registry select a provider.
AUTO = "auto"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of `graftlm plugins`.

    Attributes:
        unavailable: reason why the provider cannot run on the registry's platform; None if it can.
    """

    family: str
    name: str
    summary: str
    plugin: str
    distribution: str
    version: str | None
    unavailable: str | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate for "auto": one name of a family.

    Attributes:
        provider: the provider; None if the name cannot be selected, such as when two distributions provide it.
        distribution: the distribution of the provider.
        obstacle: reason why "auto" cannot select the provider; None if it can.
    """

    name: str
    provider: Provider[Any] | None
    distribution: str
    obstacle: str | None


class Registry:
    """The providers of all loaded plugins. Immutable; created by `load`.

    `failures` has the plugins and providers that failed to load. A failure is fatal only if the configuration selects
    the failed provider.
    """

    def __init__(
        self,
        loader: PluginLoader,
        offers: Sequence[Offer],
        failures: Sequence[PluginFailure],
        settings: PluginSettings,
        platform: Platform,
        objects: Sequence[object] = (),
        trace: HookTrace | None = None,
    ) -> None:
        self.platform = platform
        self._trace = trace or HookTrace()
        self.failures = tuple(failures)
        self._loader = loader
        self._offers = tuple(offers)
        self._settings = settings
        self._objects = tuple(objects)

    @classmethod
    def load(
        cls,
        settings: PluginSettings | None = None,
        plugins: Sequence[object] = (),
        platform: Platform | None = None,
    ) -> Registry:
        """Load the installed plugins, then `settings.modules`, then `plugins`, and collect their providers.

        Args:
            settings: settings of plugins; None: the defaults.
            plugins: modules, import names of modules, or instances with functions marked `@hookimpl`.
            platform: the machine that determines availability; None: a machine without a GPU.

        Raises:
            PluginLoadError: one of `plugins` is wrong. Failures of other plugins are recorded in `failures`.
            ConfigError: a key of `settings.prefer` has no known family.
        """
        if isinstance(plugins, str):
            raise PluginLoadError(f"plugins: expected a list, got {plugins!r}; write [{plugins!r}]")
        settings = settings or PluginSettings()
        _check_prefer(settings.prefer)
        trace = trace_of(os.environ)
        loader = PluginLoader(settings.disabled, trace)
        loader.load_installed()
        for name in settings.modules:
            loader.load_module(name)
        given = [loader.load_object(plugin) for plugin in plugins]
        offers, failures = collect(loader, trace)
        _warn_of_unknown(settings, loader, offers)
        for failure in failures:
            if failure.plugin in given:
                raise failure.error
        return cls(loader, offers, [*loader.failures, *failures], settings, platform or Platform(), plugins, trace)

    def names(self, family: str) -> list[str]:
        """Return the sorted names of a family's providers, whether or not they can run here."""
        return sorted({offer.provider.name for offer in self._offers if offer.family.key == family})

    def find(self, family: str, name: str, config_path: str | None = None) -> Provider[Any]:
        """Return the provider of a name, whether or not it can run here.

        Args:
            family: a key of `FAMILIES`.
            name: the configured name.
            config_path: configuration key of the name, for messages; None: the family's key.

        Raises:
            UnknownProviderError: no distribution provides the name, or `plugins.prefer` selects a distribution that
                does not.
            DuplicateProviderError: several distributions provide the name.
            PluginLoadError: the provider was refused when its plugin was loaded.
        """
        kind = FAMILIES[family]
        offers = [offer for offer in self._offers if offer.family is kind and offer.provider.name == name]
        if preferred := self._settings.prefer.get(f"{family}/{name}"):
            return self._preferred(kind, name, offers, preferred).provider
        if not offers:
            raise self._unknown(kind, name, config_path)
        if len(offers) > 1:
            raise DuplicateProviderError(_duplicate(kind, name, offers))
        return offers[0].provider

    def provider(self, family: str, name: str, config_path: str | None = None) -> Provider[Any]:
        """Return the provider of a name, if it can run here; "auto" calls `choose`.

        Raises:
            UnknownProviderError, DuplicateProviderError, PluginLoadError: see `find`.
            ProviderUnavailableError: the provider cannot run on this platform.
        """
        if name == AUTO:
            return self.choose(family)
        found = self.find(family, name, config_path)
        if why := self.why_not(found):
            kind = FAMILIES[family]
            here = ", ".join(p.name for p in self.available(family)) or "none"
            raise ProviderUnavailableError(
                f"{_capital(kind.title)} '{name}' ({self._label(found)}) cannot run here: {why}. "
                f"Available here: {here}.{_set(config_path or kind.name_path)}"
            )
        return found

    def why_not(self, provider: Provider[Any], platform: Platform | None = None) -> str | None:
        """Return the reason why a provider cannot run on `platform` (None: the registry's platform); None if it can."""
        try:
            return provider.unavailable(platform or self.platform)
        except Exception as error:
            return f"its check of the machine failed: {describe_error(error)}"

    def available(self, family: str, platform: Platform | None = None) -> list[Provider[Any]]:
        """Return the providers of a family that can run, best first: by rank, then by name."""
        return [one.provider for one in self.candidates(family, platform) if one.provider and one.obstacle is None]

    def choose(
        self,
        family: str,
        platform: Platform | None = None,
        fits: Callable[[Provider[Any]], str | None] | None = None,
    ) -> Provider[Any]:
        """Return the provider that "auto" selects: the available, fitting provider with the highest rank.

        Providers of equal rank are ordered by name.

        Args:
            family: a key of `FAMILIES`.
            platform: the platform; None: the registry's platform.
            fits: function that returns the reason why a provider does not match the model or the configuration, or
                None.

        Raises:
            ProviderUnavailableError: no provider is available and fits; the message has the reason for each.
        """
        candidates = self.candidates(family, platform, fits)
        for candidate in candidates:
            if candidate.provider is not None and candidate.obstacle is None:
                return candidate.provider
        reasons = [f"{candidate.name}: {candidate.obstacle}" for candidate in candidates]
        title = FAMILIES[family].title
        if not reasons:
            raise ProviderUnavailableError(f"No {title} is installed.{self._failure_notes()}")
        raise ProviderUnavailableError(f"No {title} can be used here: {'; '.join(reasons)}.{self._failure_notes()}")

    def candidates(
        self,
        family: str,
        platform: Platform | None = None,
        fits: Callable[[Provider[Any]], str | None] | None = None,
    ) -> list[Candidate]:
        """Return all names of a family, best first, with the reason why "auto" cannot select each; see `choose`."""
        found, unclear = [], []
        for name in self.names(family):
            try:
                provider = self.find(family, name)
            except PluginError as error:
                unclear.append(Candidate(name, None, "", str(error)))
                continue
            obstacle = self.why_not(provider, platform)
            if obstacle is None and fits is not None:
                obstacle = fits(provider)
            found.append((-provider.rank, Candidate(name, provider, self._label(provider), obstacle)))
        found.sort(key=lambda pair: (pair[0], pair[1].name))
        return [*(candidate for _, candidate in found), *unclear]

    def model_for(self, architectures: Sequence[str], name: str = AUTO) -> Provider[Any]:
        """Return the model provider for a checkpoint.

        Args:
            architectures: the architectures in its config.json, such as ("LlamaForCausalLM",).
            name: a provider's name; "auto" selects the best available provider that lists an architecture, else the
                best that supports any architecture.

        Raises:
            UnsupportedArchitectureError: no provider supports the architectures.
            PluginError: see `provider`.
        """
        if name != AUTO:
            return self.provider("model", name)
        misfit = self.model_misfit(architectures)
        if misfit is not None:
            return self.choose("model", fits=misfit)
        claimed = sorted({name for one in self._providers("model") for name in one.capabilities.architectures})
        wanted = " or ".join(architectures) or "a checkpoint without architectures"
        close = next(filter(None, (nearest(one, claimed) for one in architectures)), None)
        hint = f" The nearest is {close}." if close else ""
        raise UnsupportedArchitectureError(
            f"No model supports {wanted}. Supported architectures: {', '.join(claimed) or 'none'}.{hint} "
            f"Install a plugin that supports it, or set model.architecture to one of: "
            f"{', '.join(self.names('model')) or 'none'}.{self._failure_notes()}"
        )

    def model_misfit(self, architectures: Sequence[str]) -> Callable[[Provider[Any]], str | None] | None:
        """Return the `fits` function of `model_for` for "auto"; None: no provider supports the checkpoint."""
        return model_misfit(architectures, self._providers("model"))

    def options(
        self,
        provider: Provider[Any],
        raw: Mapping[str, Any] | BaseModel,
        where: str,
        origins: Mapping[KeyPath, Origin] | None = None,
    ) -> BaseModel:
        """Check options with the provider's pydantic model.

        Args:
            provider: the provider of the options.
            raw: the configured options; an instance of the provider's model is returned unchanged.
            where: dotted path of the options in the configuration, for messages.
            origins: `EngineConfig.origins`; with it, messages have file and line.

        Raises:
            ConfigError: an option is wrong; one line per option.
        """
        if isinstance(raw, provider.options):
            return raw
        values = raw.model_dump(exclude_unset=True) if isinstance(raw, BaseModel) else dict(raw)
        try:
            return provider.options.model_validate(values)
        except ValidationError as error:
            prefix = tuple(where.split("."))
            raise ConfigError(report(problems_in(error, provider.options, values, origins or {}, prefix))) from error

    def create(
        self,
        family: str,
        provider: Provider[T],
        raw_options: Mapping[str, Any] | BaseModel,
        context: object,
        origins: Mapping[KeyPath, Origin] | None = None,
    ) -> T:
        """Check options, call the provider's `create`, and check the result.

        Raises:
            ConfigError: an option is wrong.
            PluginError: `create` failed (its error is the cause), or returned an object that does not implement the
                contract.
            GraftlmError: raised by `create`.
        """
        kind = FAMILIES[family]
        options = self.options(provider, raw_options, kind.options_path or f"{family}.{provider.name}", origins)
        who = f"{_capital(kind.title)} '{provider.name}' ({self._label(provider)})"
        try:
            created = provider.create(options, context)
        except GraftlmError:
            raise
        except Exception as error:
            raise PluginError(f"{who} could not be created: {describe_error(error)}") from error
        if not isinstance(created, kind.contract):
            raise PluginError(
                f"{who} must create an instance of graftlm.contracts.{kind.contract.__name__}, got "
                f"{type(created).__module__}.{type(created).__qualname__}"
            )
        return created

    def entries(self) -> list[Entry]:
        """Return all providers, by family and name; the providers that failed to load are in `failures`."""
        order = list(FAMILIES)
        offers = sorted(self._offers, key=lambda o: (order.index(o.family.key), o.provider.name, o.plugin.distribution))
        return [
            Entry(
                family=offer.family.key,
                name=offer.provider.name,
                summary=offer.provider.summary,
                plugin=offer.plugin.name,
                distribution=offer.plugin.distribution,
                version=offer.plugin.version,
                unavailable=self.why_not(offer.provider),
            )
            for offer in offers
        ]

    def observers(self, hook: str) -> tuple[Callable[[Any], object], ...]:
        """Return the functions to call with a hook's record; () without observers. Call this once, not per record."""
        found = self._loader.implementations(hook)
        for who in [f"{one.plugin.name} ({one.plugin.label}): observes" for one in found] or ["no observers"]:
            self._trace.write(hook, who)
        return tuple(one.function if one.argument_names else _ignoring_argument(one.function) for one in found)

    def listeners(self) -> list[Listener]:
        """Return all observers, by hook."""
        return list(listeners(self._loader))

    def import_names(self) -> list[str]:
        """Return the value of `plugins.modules` with which another process loads the same plugins.

        Raises:
            PluginLoadError: a plugin was passed as an object that cannot be imported; the message has its name.
        """
        return list(dict.fromkeys([*self._settings.modules, *import_names(self._objects)]))

    def provider_modules(self) -> list[str]:
        """Return the value of `plugins.modules` with which another process has the same providers.

        Objects that only observe are left out. Raises: see `import_names`.
        """
        hooks = [family.hook for family in FAMILIES.values()]
        given = [one for one in self._objects if isinstance(one, str) or any(hasattr(one, hook) for hook in hooks)]
        return list(dict.fromkeys([*self._settings.modules, *import_names(given)]))

    def _providers(self, family: str) -> list[Provider[Any]]:
        return [offer.provider for offer in self._offers if offer.family.key == family]

    def _preferred(self, kind: Family, name: str, offers: Sequence[Offer], preferred: str) -> Offer:
        chosen = [offer for offer in offers if offer.plugin.has_name(preferred)]
        if len(chosen) == 1:
            return chosen[0]
        if chosen:
            raise DuplicateProviderError(_duplicate(kind, name, chosen))
        have = ", ".join(offer.plugin.label for offer in offers) or "no distribution"
        raise UnknownProviderError(
            f"plugins.prefer selects '{preferred}' for {kind.key}/{name}, but '{preferred}' does not provide it. "
            f"Provided by: {have}. Change plugins.prefer.{self._failure_notes()}"
        )

    def _unknown(self, kind: Family, name: str, config_path: str | None) -> Exception:
        for failure in self.failures:
            if failure.family == kind.key and failure.provider == name:
                return failure.error
        names = self.names(kind.key)
        close = nearest(name, names)
        hint = f" Did you mean '{close}'?" if close else ""
        return UnknownProviderError(
            f"Unknown {kind.title} '{name}'. Available: {', '.join(names) or 'none'}."
            f"{_set(config_path or kind.name_path)}{hint}{self._failure_notes()}"
        )

    def _failure_notes(self) -> str:
        """Return notes about failed plugins, which may be the reason for a missing provider."""
        return "".join(f" Note: {failure}." for failure in self.failures)

    def distribution(self, provider: Provider[Any]) -> str:
        """Return the distribution of a provider of this registry, with its version."""
        return self._label(provider)

    def _label(self, provider: Provider[Any]) -> str:
        return next((o.plugin.label for o in self._offers if o.provider is provider), "unregistered")


def _check_prefer(prefer: Iterable[str]) -> None:
    for key in prefer:
        family, slash, name = key.partition("/")
        if slash and name and family in FAMILIES:
            continue
        close = nearest(family, FAMILIES)
        hint = f"did you mean '{close}/{name or 'name'}'?" if close else f"families are: {', '.join(FAMILIES)}"
        raise ConfigError(f"plugins.prefer: '{key}' must be family/name, such as eviction/lru; {hint}")


def _warn_of_unknown(settings: PluginSettings, loader: PluginLoader, offers: Sequence[Offer]) -> None:
    """Log names in `plugins.disabled` and `plugins.prefer` that match no plugin or provider."""
    for name, close in loader.unknown(settings.disabled):
        logger.warning("plugins.disabled: no plugin has the name '%s'%s", name, _did_you_mean(close))
    offered = {f"{offer.family.key}/{offer.provider.name}" for offer in offers}
    for key in settings.prefer:
        if key not in offered:
            logger.warning("plugins.prefer: nothing provides '%s'%s", key, _did_you_mean(nearest(key, sorted(offered))))
    for name, close in loader.unknown(settings.prefer.values()):
        logger.warning("plugins.prefer: no plugin has the name '%s'%s", name, _did_you_mean(close))


def _did_you_mean(close: str | None) -> str:
    return f"; did you mean '{close}'?" if close else ""


def _duplicate(kind: Family, name: str, offers: Sequence[Offer]) -> str:
    offers = sorted(offers, key=lambda offer: (offer.plugin.label, offer.plugin.name))
    labels = [offer.plugin.label for offer in offers]
    if len(set(labels)) < len(labels):  # the same distribution twice: use the plugins' names
        labels = [f"{offer.plugin.label} (plugin '{offer.plugin.name}')" for offer in offers]
        choice = offers[0].plugin.name
    else:
        choice = offers[0].plugin.distribution
    return (
        f"{_capital(kind.title)} '{name}' is provided by {' and by '.join(labels)}. "
        f"Choose with plugins.prefer: {{{kind.key}/{name}: {choice}}}, or disable one with plugins.disabled."
    )


def _ignoring_argument(function: Callable[[], object]) -> Callable[[Any], object]:
    return lambda record: function()


def _capital(title: str) -> str:
    return title[0].upper() + title[1:]


def _set(config_path: str | None) -> str:
    return f" Set {config_path}." if config_path else ""
