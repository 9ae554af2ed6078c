"""Lists the plugins that implement observer hooks, which receive records of requests, steps and cache events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from graftlm.registry.loading import PluginLoader

__all__ = ["OBSERVER_HOOKS", "Listener", "listeners"]

#: The hooks that receive records and provide nothing.
OBSERVER_HOOKS: Final = ("request_finished", "step_finished", "cache_event")


@dataclass(frozen=True, slots=True)
class Listener:
    """One observer hook of one plugin, as `graftlm plugins` lists it."""

    hook: str
    plugin: str
    distribution: str
    version: str | None


def listeners(loader: PluginLoader) -> Iterator[Listener]:
    """Yield the observers of each hook, in the order in which they are called."""
    for hook in OBSERVER_HOOKS:
        for implementation in loader.implementations(hook):
            plugin = implementation.plugin
            yield Listener(hook, plugin.name, plugin.distribution, plugin.version)
