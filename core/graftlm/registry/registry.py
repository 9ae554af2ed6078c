"""Registry: which providers there are, which one a name means, and why not."""

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

#: The name that leaves the choice to the registry.
AUTO = "auto"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of `graftlm plugins`.

    Attributes:
        unavailable: why it cannot run on the registry's platform; None when it can.
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
    """One name of a family, as "auto" sees it.

    Attributes:
        provider: None when nobody can select the name as things are.
        distribution: who provides it.
        obstacle: why it is not taken; None when it can be.
    """

    name: str
    provider: Provider[Any] | None
    distribution: str
    obstacle: str | None


class Registry:
    """What the loaded plugins offer. Immutable; `load` makes one.

    Plugins and providers that failed to load are in `failures`; they stop nobody but who selects them.
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
        """Load the installed plugins, then `settings.modules`, then `plugins`, and collect what they offer.

        Args:
            settings: None takes the defaults.
            plugins: modules, import names of modules, or instances with functions marked `@hookimpl`.
            platform: what availability is judged by; None is a machine without a GPU.

        Raises:
            PluginLoadError: one of `plugins` is wrong. Any other plugin that fails is recorded in `failures`.
            ConfigError: `settings.prefer` names no family.
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
        """Return the names that providers of a family have, sorted, whether or not they can run here."""
        return sorted({offer.provider.name for offer in self._offers if offer.family.key == family})

    def find(self, family: str, name: str, config_path: str | None = None) -> Provider[Any]:
        """Return the provider that a name means, whether or not it can run here.

        Args:
            family: a key of `FAMILIES`.
            name: as configured.
            config_path: where the name was configured, for messages; None takes the family's.

        Raises:
            UnknownProviderError: nobody provides it, or not the distribution that `plugins.prefer` says.
            DuplicateProviderError: several distributions do.
            PluginLoadError: it was refused when its plugin was loaded.
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
        """Return the provider that a name means, sure to run here; "auto" is `choose`.

        Raises:
            UnknownProviderError, DuplicateProviderError, PluginLoadError: as `find`.
            ProviderUnavailableError: it cannot run on this platform.
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
        """Return why a provider cannot run on a platform (None: the registry's), or None when it can."""
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
        """Return what "auto" means: the available provider of the highest rank that fits, ties by name.

        Args:
            family: a key of `FAMILIES`.
            platform: None takes the registry's.
            fits: why a provider does not suit the model or the configuration, or None.

        Raises:
            ProviderUnavailableError: none does; the message says why not of each.
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
        """Return every name of a family, best first, with what keeps "auto" from it; arguments as in `choose`."""
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
            architectures: what its config.json says, such as ("LlamaForCausalLM",).
            name: a provider's name; "auto" takes the best available one that claims an architecture, else of those that
                take any.

        Raises:
            UnsupportedArchitectureError: nobody claims any of them.
            PluginError: as `provider`.
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
            f"No model serves {wanted}. Supported architectures: {', '.join(claimed) or 'none'}.{hint} "
            f"Install a plugin that serves it, or set model.architecture to one of: "
            f"{', '.join(self.names('model')) or 'none'}.{self._failure_notes()}"
        )

    def model_misfit(self, architectures: Sequence[str]) -> Callable[[Provider[Any]], str | None] | None:
        """Return what `model_for` asks of a provider when the name is "auto"; None: nobody serves the checkpoint."""
        return model_misfit(architectures, self._providers("model"))

    def options(
        self,
        provider: Provider[Any],
        raw: Mapping[str, Any] | BaseModel,
        where: str,
        origins: Mapping[KeyPath, Origin] | None = None,
    ) -> BaseModel:
        """Check options with the provider's own model.

        Args:
            provider: whose options they are.
            raw: as configured; an instance of the provider's model is returned as it is.
            where: their dotted path in the configuration, for messages.
            origins: `EngineConfig.origins`; with it, messages give file and line.

        Raises:
            ConfigError: an option is wrong; one line for each.
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
        """Check options, call the provider's `create`, and check what it returns.

        Raises:
            ConfigError: an option is wrong.
            PluginError: `create` failed (its error is the cause), or returned something else than the contract.
            GraftlmError: what `create` itself raised on purpose.
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
        """Return every provider, by family and name; `failures` has what could not be loaded."""
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
        """Return what to call with a hook's record; () when nobody listens. Look it up once."""
        found = self._loader.implementations(hook)
        for who in [f"{one.plugin.name} ({one.plugin.label}): observes" for one in found] or ["nobody observes"]:
            self._trace.tell(hook, who)
        return tuple(one.function if one.argument_names else _ignoring_argument(one.function) for one in found)

    def listeners(self) -> list[Listener]:
        """Return every observer, by hook."""
        return list(listeners(self._loader))

    def import_names(self) -> list[str]:
        """Return the `plugins.modules` with which another process loads what this registry loaded.

        Raises:
            PluginLoadError: a plugin was given as an object that cannot be imported; the message names it.
        """
        return list(dict.fromkeys([*self._settings.modules, *import_names(self._objects)]))

    def _providers(self, family: str) -> list[Provider[Any]]:
        return [offer.provider for offer in self._offers if offer.family.key == family]

    def _preferred(self, kind: Family, name: str, offers: Sequence[Offer], preferred: str) -> Offer:
        chosen = [offer for offer in offers if offer.plugin.is_called(preferred)]
        if len(chosen) == 1:
            return chosen[0]
        if chosen:
            raise DuplicateProviderError(_duplicate(kind, name, chosen))
        have = ", ".join(offer.plugin.label for offer in offers) or "nobody"
        raise UnknownProviderError(
            f"plugins.prefer takes {kind.key}/{name} from '{preferred}', which does not provide it. "
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
        """Say which plugins failed: what is missed may be theirs."""
        return "".join(f" Note: {failure}." for failure in self.failures)

    def distribution(self, provider: Provider[Any]) -> str:
        """Return the distribution, with its version, that a provider of this registry comes from."""
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
    """Log what `plugins.disabled` and `plugins.prefer` name and nobody is called: misspelt, so without effect."""
    for name, close in loader.unknown(settings.disabled):
        logger.warning("plugins.disabled: no plugin is called '%s'%s", name, _did_you_mean(close))
    offered = {f"{offer.family.key}/{offer.provider.name}" for offer in offers}
    for key in settings.prefer:
        if key not in offered:
            logger.warning("plugins.prefer: nothing provides '%s'%s", key, _did_you_mean(nearest(key, sorted(offered))))
    for name, close in loader.unknown(settings.prefer.values()):
        logger.warning("plugins.prefer: no plugin is called '%s'%s", name, _did_you_mean(close))


def _did_you_mean(close: str | None) -> str:
    return f"; did you mean '{close}'?" if close else ""


def _duplicate(kind: Family, name: str, offers: Sequence[Offer]) -> str:
    offers = sorted(offers, key=lambda offer: (offer.plugin.label, offer.plugin.name))
    labels = [offer.plugin.label for offer in offers]
    if len(set(labels)) < len(labels):  # one distribution twice: only the plugins' names tell them apart
        labels = [f"{offer.plugin.label} (plugin '{offer.plugin.name}')" for offer in offers]
        choice = offers[0].plugin.name
    else:
        choice = offers[0].plugin.distribution
    return (
        f"{_capital(kind.title)} '{name}' is provided by {' and by '.join(labels)}. "
        f"Choose with plugins.prefer: {{{kind.key}/{name}: {choice}}}, or leave one out with plugins.disabled."
    )


def _ignoring_argument(function: Callable[[], object]) -> Callable[[Any], object]:
    return lambda record: function()


def _capital(title: str) -> str:
    return title[0].upper() + title[1:]


def _set(config_path: str | None) -> str:
    return f" Set {config_path}." if config_path else ""
