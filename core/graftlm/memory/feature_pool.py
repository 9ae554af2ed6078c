"""Bookkeeping of the memory for features of pictures; the features are tensors of the runner."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from graftlm.errors import InvariantError

__all__ = ["FeaturePool"]


@dataclass(slots=True)
class _Entry:
    num_rows: int
    num_users: int
    is_ready: bool = False


class FeaturePool:
    """Decides which pictures' features are in memory.

        acquire -> being computed -> `set_ready` -> ready, used -> `release` -> ready, evictable -> dropped

    Features without users are evicted in order of their last use, when others need the room.

    Args:
        num_rows: capacity in rows of features.

    Attributes:
        num_computed: number of pictures whose features were computed.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_computed = 0
        self._num_used = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._dropped: list[bytes] = []

    @property
    def num_pending(self) -> int:
        """Number of pictures whose features are being computed."""
        return sum(not entry.is_ready for entry in self._entries.values())

    @property
    def num_held_rows(self) -> int:
        """Number of rows in use or evictable."""
        return self._num_used

    def holds(self, key: bytes) -> bool:
        """Return whether features are ready or being computed."""
        return key in self._entries

    def is_ready(self, key: bytes) -> bool:
        """Return whether features are ready."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_ready

    def acquire(self, key: bytes, num_rows: int) -> bool:
        """Add a user to features, and reserve room if they are not in memory. Return False if there is no room."""
        entry = self._entries.get(key)
        if entry is None:
            if not self._make_room(num_rows):
                return False
            entry = self._entries[key] = _Entry(num_rows, 0)
            self._num_used += num_rows
        entry.num_users += 1
        self._entries.move_to_end(key)
        return True

    def release(self, key: bytes) -> None:
        """Remove a user. Features that `fail` or `clear` has removed are ignored."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.num_users -= 1
        if entry.num_users < 0:
            raise InvariantError("features of a picture were released more often than acquired")

    def set_ready(self, keys: Iterable[bytes]) -> None:
        """Record that features have been computed. Features that were dropped in the meantime are ignored."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and not entry.is_ready:
                entry.is_ready = True
                self.num_computed += 1

    def fail(self, key: bytes) -> None:
        """Remove features that could not be computed."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_used -= entry.num_rows

    def clear(self) -> None:
        """Drop all features."""
        self._dropped += self._entries
        self._entries.clear()
        self._num_used = 0

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the features to delete that have not been returned yet."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _make_room(self, num_rows: int) -> bool:
        """Evict features without users until `num_rows` rows are free."""
        lacking = self._num_used + num_rows - self.num_rows
        victims = []
        for key, entry in self._entries.items():
            if lacking <= 0:
                break
            if not entry.num_users:
                victims.append(key)
                lacking -= entry.num_rows
        if lacking > 0:
            return False
        for key in victims:
            self._num_used -= self._entries.pop(key).num_rows
            self._dropped.append(key)
        return True
