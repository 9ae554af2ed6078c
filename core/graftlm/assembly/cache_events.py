"""The cache events of an engine, over all the caches that follow one another in it."""

from collections.abc import Callable, Sequence
from typing import Any

from graftlm.observers import notify
from graftlm.records import CacheEvent

__all__ = ["CacheEvents"]


class CacheEvents:
    """Tells observers of what caches report, and when one is given up.

    Args:
        observers: hooks that take a `CacheEvent`.
    """

    def __init__(self, observers: Sequence[Callable[..., Any]]) -> None:
        self._observers = tuple(observers)
        self._num_tokens = 0  # in the nodes of which observers know

    @property
    def listener(self) -> Callable[[CacheEvent], None] | None:
        """What a cache calls; None when nobody observes."""
        return self._report if self._observers else None

    def clear(self) -> None:
        """Tell that the cache is gone with all its nodes, whatever had become of it; another may follow."""
        if self._observers:
            self._report(CacheEvent("cleared", self._num_tokens))

    def _report(self, event: CacheEvent) -> None:
        if event.kind == "stored":
            self._num_tokens += event.num_tokens
        elif event.kind == "removed":
            self._num_tokens -= event.num_tokens
        elif event.kind == "cleared":
            self._num_tokens = 0
        notify(self._observers, event)
