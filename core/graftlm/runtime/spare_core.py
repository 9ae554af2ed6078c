"""Counts computations in parallel with steps, during which steps use one core less."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["SpareCore"]


class SpareCore:
    """Records the computations (users) for which steps leave a core free, such as compiling a grammar. Thread-safe.

    Args:
        clock: clock in seconds.
        limit_s: maximum time in seconds, from the start of the latest user, for which steps use one core less. Without
            this limit, a user that never ends would slow down steps permanently.
    """

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._came_s: list[float] = []  # start time of each user, ascending

    @property
    def is_taken(self) -> bool:
        """Whether steps should use one core less."""
        latest = self._came_s[-1:]
        return bool(latest) and self._clock() - latest[0] < self._limit_s

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Reserve a core while the context is active, from the next step on."""
        with self._lock:
            came_s = self._clock()
            self._came_s.append(came_s)
        try:
            yield
        finally:
            with self._lock:
                self._came_s.remove(came_s)
