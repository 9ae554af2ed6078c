"""Whether something computes for long beside the steps, which then leave it a core."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SpareCore"]


class SpareCore:
    """Knows of what computes beside the steps. All methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0

    @property
    def is_taken(self) -> bool:
        """Whether steps should do with a core less."""
        return self._num_users > 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Ask for a core, from the next step on, for as long as the context is entered."""
        with self._lock:
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
