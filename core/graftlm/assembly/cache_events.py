"""The cache events of an engine, across restarts of its prefix cache."""

from collections.abc import Callable, Sequence
from typing import Any

from graftlm.observers import notify
from graftlm.records import CacheEvent

__all__ = ["CacheEvents"]


class CacheEvents:
    """Passes the events of prefix caches to observers, and reports a "cleared" event when a cache is discarded.

    Args:
        observers: hooks that get each `CacheEvent`.
    """

    def __init__(self, observers: Sequence[Callable[..., Any]]) -> None:
        self._observers = tuple(observers)
        self._num_tokens = 0  # number of tokens in the nodes that observers have

    @property
    def listener(self) -> Callable[[CacheEvent], None] | None:
        """The function that a cache calls with each event; None if there are no observers."""
        return self._report if self._observers else None

    def clear(self) -> None:
        """Report that the cache was discarded, and with it all nodes."""
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
