"""The built-in providers of each family, which the distribution graftlm registers."""

from functools import cache
from typing import Any

from graftlm.config import PluginSettings
from graftlm.contracts import Provider
from graftlm.registry import Registry, probe_platform

__all__ = ["builtin_providers"]


@cache
def builtin_providers(family: str) -> tuple[Provider[Any], ...]:
    """Return the built-in providers of a family, sorted by name; other installed providers are left out."""
    registry = _registry()
    entries = sorted(registry.entries(), key=lambda entry: entry.name)
    return tuple(
        registry.find(family, entry.name)
        for entry in entries
        if entry.family == family and entry.distribution == "graftlm"
    )


@cache
def _registry() -> Registry:
    return Registry.load(PluginSettings(), platform=probe_platform("cpu"))
