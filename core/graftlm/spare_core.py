"""Whether something computes for long beside the steps, which then leave it a core."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["SpareCore"]


class SpareCore:
    """Knows of what computes beside the steps. All methods may be called from several threads.

    Args:
        clock: in seconds.
        limit_s: for how long steps make room after the last user came. One that never ends would slow them for ever.
    """

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._num_users = 0
        self._last_came_s = 0.0

    @property
    def is_taken(self) -> bool:
        """Whether steps should do with a core less."""
        return self._num_users > 0 and self._clock() - self._last_came_s < self._limit_s

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Ask for a core, from the next step on, for as long as the context is entered."""
        with self._lock:
            self._num_users += 1
            self._last_came_s = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
