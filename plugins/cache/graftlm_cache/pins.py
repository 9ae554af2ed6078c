"""The pins of a radix tree: prefixes that are evicted last, each until a given time."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from graftlm_cache.node import RadixNode

__all__ = ["MAX_PINS", "Pins"]

#: Maximum number of simultaneous pins. It is limited, because each eviction of window pages visits all pins.
MAX_PINS: Final = 4096

#: Stale end times are removed only if there are more than this number.
_SLACK: Final = 64


@dataclass(frozen=True, slots=True)
class _Pin:
    """One pin; `stamp` distinguishes it from earlier pins of the same tokens."""

    key: bytes
    node: RadixNode
    stamp: int


class Pins:
    """Maps pinned tokens to nodes, and orders the pins by the time at which they end.

    A pin is weaker than a lock: a pinned leaf is evicted if no unpinned leaf is left, and the pin that ends first is
    evicted first. So pins never delay a request.

    A pin is stored under a digest of its namespace and tokens, so it needs the same memory for any length of prompt.
    The end times of removed and renewed pins are stale; they are removed together when they outnumber the valid ones.

    Args:
        max_pins: maximum number of pins.
    """

    def __init__(self, max_pins: int = MAX_PINS) -> None:
        self._max_pins = max_pins
        self._pins: dict[bytes, _Pin] = {}
        self._ends: list[tuple[float, int, _Pin]] = []  # stamps are unique, so that pins are never compared
        self._stamps = itertools.count()

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_ends(self) -> int:
        """Number of stored end times, including stale ones: at most two per pin plus a constant."""
        return len(self._ends)

    def nodes(self) -> Iterator[RadixNode]:
        """Yield the node of every pin."""
        return (pin.node for pin in self._pins.values())

    def has_room(self, namespace: str, tokens: bytes) -> bool:
        """Return whether these tokens can be pinned: they are pinned already, or the limit is not reached."""
        return len(self._pins) < self._max_pins or _key(namespace, tokens) in self._pins

    def add(self, namespace: str, tokens: bytes, node: RadixNode, ends_s: float) -> RadixNode | None:
        """Pin a node, replacing an earlier pin of the same tokens.

        Args:
            namespace: namespace of the tokens.
            tokens: bytes of the token ids, int32.
            node: the last node of the pinned prefix.
            ends_s: clock reading at which the pin ends, in seconds.

        Returns: the node of the earlier pin, or None.
        """
        previous = self.remove(namespace, tokens)
        node.num_pins += 1
        pin = _Pin(_key(namespace, tokens), node, next(self._stamps))
        self._pins[pin.key] = pin
        heappush(self._ends, (ends_s, pin.stamp, pin))
        return previous

    def remove(self, namespace: str, tokens: bytes) -> RadixNode | None:
        """End a pin. Return its node, or None if there is no such pin."""
        return self._remove(_key(namespace, tokens))

    def pop_ended(self, now: float) -> RadixNode | None:
        """End the pin that ends first, if its end time has passed. Return its node, or None."""
        self._drop_stale()
        return self.pop_first() if self._ends and self._ends[0][0] <= now else None

    def pop_first(self) -> RadixNode | None:
        """End the pin that ends first, even before its end time. Return its node, or None if there are no pins."""
        self._drop_stale()
        return self._remove(heappop(self._ends)[2].key) if self._ends else None

    def clear(self) -> None:
        """End every pin."""
        for pin in self._pins.values():
            pin.node.num_pins -= 1
        self._pins.clear()
        self._ends.clear()

    def _remove(self, key: bytes) -> RadixNode | None:
        pin = self._pins.pop(key, None)
        if pin is None:
            return None
        pin.node.num_pins -= 1
        if len(self._ends) > 2 * len(self._pins) + _SLACK:
            self._ends = [end for end in self._ends if self._is_valid(end[2])]
            heapify(self._ends)
        return pin.node

    def _drop_stale(self) -> None:
        """Remove stale end times from the top of the heap."""
        while self._ends and not self._is_valid(self._ends[0][2]):
            heappop(self._ends)

    def _is_valid(self, pin: _Pin) -> bool:
        return self._pins.get(pin.key) is pin


def _key(namespace: str, tokens: bytes) -> bytes:
    name = namespace.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(len(name).to_bytes(8, "little"), digest_size=16)
    digest.update(name)
    digest.update(tokens)
    return digest.digest()
