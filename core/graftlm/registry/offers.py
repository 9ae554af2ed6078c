"""Collects what plugins offer, and checks each provider before anyone can select it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from graftlm.contracts import API_VERSION, Provider
from graftlm.errors import ApiVersionError, PluginLoadError
from graftlm.registry.families import FAMILIES, Family
from graftlm.registry.loading import HookImplementation, Plugin, PluginFailure, PluginLoader, describe_error

__all__ = ["Offer", "collect"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_RESERVED_NAMES = ("auto",)


@dataclass(frozen=True, slots=True)
class Offer:
    """A checked provider, its family, and the plugin it comes from."""

    family: Family
    provider: Provider[Any]
    plugin: Plugin


def collect(loader: PluginLoader) -> tuple[list[Offer], list[PluginFailure]]:
    """Ask every loaded plugin what it offers; what fails a check is left out and returned as a failure."""
    offers: list[Offer] = []
    failures: list[PluginFailure] = []
    for family in FAMILIES.values():
        for implementation in loader.implementations(family.hook):
            plugin = implementation.plugin
            try:
                offered = _offered(implementation, family)
            except PluginLoadError as error:
                failures.append(PluginFailure(plugin, error, family.key))
                continue
            for item in offered:
                try:
                    offers.append(Offer(family, _checked(item, family, plugin), plugin))
                except PluginLoadError as error:
                    name = item.name if isinstance(item, Provider) and isinstance(item.name, str) else None
                    failures.append(PluginFailure(plugin, error, family.key, name))
    return offers, failures


def _offered(implementation: HookImplementation, family: Family) -> list[object]:
    plugin = implementation.plugin
    try:
        result = implementation.function()
    except Exception as error:
        raise PluginLoadError(
            f"plugin '{plugin.name}' (dist {plugin.label}) failed in {family.hook}: {describe_error(error)}"
        ) from error
    try:
        return list(result)
    except TypeError as error:
        raise PluginLoadError(
            f"plugin '{plugin.name}' (dist {plugin.label}) must return a list of providers from {family.hook}, "
            f"got {type(result).__name__}"
        ) from error
    except Exception as error:  # a generator that raised half-way
        raise PluginLoadError(
            f"plugin '{plugin.name}' (dist {plugin.label}) failed in {family.hook}: {describe_error(error)}"
        ) from error


def _checked(item: object, family: Family, plugin: Plugin) -> Provider[Any]:
    """Return an offered item as the provider it must be.

    Raises:
        ApiVersionError: it was built for another plugin API.
        PluginLoadError: it is not a provider, or one of its fields is wrong.
    """
    if not isinstance(item, Provider):
        raise PluginLoadError(
            f"{plugin.label} offers {item!r} through {family.hook}, which takes instances of graftlm.Provider"
        )
    if item.api_version != API_VERSION:
        remedy = "a newer" if isinstance(item.api_version, int) and item.api_version < API_VERSION else "an older"
        raise ApiVersionError(
            f"{plugin.label} built {family.title} '{item.name}' for plugin API {item.api_version}, this graftlm speaks "
            f"{API_VERSION}: install {remedy} release of {plugin.distribution}, or another graftlm"
        )
    for field, expected, holds in _FIELD_CHECKS:
        if not holds(item):
            raise PluginLoadError(
                f"{plugin.label} offers {family.title} {item.name!r} whose {field} must be {expected}, "
                f"got {getattr(item, field)!r}"
            )
    if family.capabilities is not None and not isinstance(item.capabilities, family.capabilities):
        raise PluginLoadError(
            f"{plugin.label} offers {family.title} '{item.name}' whose capabilities must be an instance of "
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
    ("rank", "a whole number", lambda p: isinstance(p.rank, int)),
)
