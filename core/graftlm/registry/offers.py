"""Collects and checks the providers of all plugins."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from graftlm.contracts import API_VERSION, OLDEST_API_VERSION, Provider
from graftlm.errors import ApiVersionError, PluginLoadError
from graftlm.registry.families import FAMILIES, Family
from graftlm.registry.hook_trace import HookTrace
from graftlm.registry.loading import HookImplementation, Plugin, PluginFailure, PluginLoader, describe_error

__all__ = ["Offer", "collect"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_RESERVED_NAMES = ("auto",)


@dataclass(frozen=True, slots=True)
class Offer:
    """A checked provider with its family and its plugin."""

    family: Family
    provider: Provider[Any]
    plugin: Plugin


def collect(
    loader: PluginLoader,
    trace: HookTrace | None = None,
    api_versions: Sequence[int] = range(OLDEST_API_VERSION, API_VERSION + 1),
) -> tuple[list[Offer], list[PluginFailure]]:
    """Return the checked providers of all loaded plugins, and the failures of all other providers.

    Args:
        trace: prints every call.
        api_versions: supported plugin API versions, oldest first.
    """
    trace = trace or HookTrace()
    offers: list[Offer] = []
    failures: list[PluginFailure] = []
    for family in FAMILIES.values():
        for implementation in loader.implementations(family.hook):
            plugin = implementation.plugin
            try:
                offered = _offered(implementation, family, trace)
            except PluginLoadError as error:
                failures.append(PluginFailure(plugin, error, family.key))
                continue
            for item in offered:
                try:
                    offers.append(Offer(family, _checked(item, family, plugin, api_versions), plugin))
                except PluginLoadError as error:
                    name = item.name if isinstance(item, Provider) and isinstance(item.name, str) else None
                    failures.append(PluginFailure(plugin, error, family.key, name))
    return offers, failures


def _offered(implementation: HookImplementation, family: Family, trace: HookTrace) -> list[object]:
    plugin = implementation.plugin
    who = f"{plugin.name} ({plugin.label})"
    try:
        return trace.call(family.hook, who, lambda: _listed(implementation.call(), family, plugin), _count)
    except PluginLoadError:
        raise
    except Exception as error:  # may also come from iterating a generator
        raise PluginLoadError(
            f"plugin '{plugin.name}' (dist {plugin.label}) failed in {family.hook}: {describe_error(error)}"
        ) from error


def _listed(result: Any, family: Family, plugin: Plugin) -> list[object]:
    try:
        items = iter(result)
    except TypeError as error:
        raise PluginLoadError(
            f"plugin '{plugin.name}' (dist {plugin.label}) must return a list of providers from {family.hook}, "
            f"got {type(result).__name__}"
        ) from error
    return list(items)


def _count(items: list[object]) -> str:
    names = ", ".join(str(getattr(item, "name", "?")) for item in items)
    return f"{len(items)} provider{'' if len(items) == 1 else 's'} ({names or 'none'})"


def _checked(item: object, family: Family, plugin: Plugin, api_versions: Sequence[int]) -> Provider[Any]:
    """Check an item that a plugin returned, and return it as a provider.

    Raises:
        ApiVersionError: the provider was built for an unsupported plugin API version.
        PluginLoadError: the item is not a provider, or one of its fields is wrong.
    """
    if not isinstance(item, Provider):
        raise PluginLoadError(
            f"{plugin.label} returned {item!r} from {family.hook}, expected instances of graftlm.Provider"
        )
    if item.api_version not in api_versions:
        oldest, newest = api_versions[0], api_versions[-1]
        remedy = "a newer" if isinstance(item.api_version, int) and item.api_version < oldest else "an older"
        speaks = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
        raise ApiVersionError(
            f"{plugin.label} built {family.title} '{item.name}' for plugin API {item.api_version}, this graftlm "
            f"supports {speaks}: install {remedy} release of {plugin.distribution}, or another version of graftlm"
        )
    for field, expected, holds in _FIELD_CHECKS:
        if not holds(item):
            raise PluginLoadError(
                f"{plugin.label} provides {family.title} {item.name!r}, whose {field} must be {expected}, "
                f"got {getattr(item, field)!r}"
            )
    if family.capabilities is not None and not isinstance(item.capabilities, family.capabilities):
        raise PluginLoadError(
            f"{plugin.label} provides {family.title} '{item.name}', whose capabilities must be an instance of "
            f"{family.capabilities.__name__}, got {item.capabilities!r}"
        )
    return item


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and value not in _RESERVED_NAMES


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\n" not in value


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


_FIELD_CHECKS: tuple[tuple[str, str, Callable[[Provider[Any]], bool]], ...] = (
    ("name", "lower case letters, digits, '_', '.' or '-', and not 'auto'", lambda p: _is_name(p.name)),
    ("summary", "one line of text", lambda p: _is_line(p.summary)),
    ("create", "a function", lambda p: callable(p.create)),
    ("options", "a pydantic model class", lambda p: _is_model(p.options)),
    ("unavailable", "a function", lambda p: callable(p.unavailable)),
    ("rank", "an integer", lambda p: isinstance(p.rank, int)),
)
