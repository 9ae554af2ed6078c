"""Whether something computes for long beside the steps, which then leave it a core."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["SpareCore"]


class SpareCore:
    """Knows of what computes beside the steps. All methods may be called from several threads.

    Args:
        clock: in seconds.
        limit_s: for how long steps make room for a user. One that never ends would slow them for ever.
    """

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._came_s: list[float] = []  # of each user, in the order in which they came

    @property
    def is_taken(self) -> bool:
        """Whether steps should do with a core less."""
        latest = self._came_s[-1:]
        return bool(latest) and self._clock() - latest[0] < self._limit_s

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Ask for a core, from the next step on, for as long as the context is entered."""
        with self._lock:
            came_s = self._clock()
            self._came_s.append(came_s)
        try:
            yield
        finally:
            with self._lock:
                self._came_s.remove(came_s)
