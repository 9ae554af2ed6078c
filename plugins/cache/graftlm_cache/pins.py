"""The pins of a radix tree: prefixes somebody asked to keep for a while, and when that while ends."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from graftlm_cache.node import RadixNode

__all__ = ["MAX_PINS", "Pins"]

#: Pins at a time: evicting window pages looks at each.
MAX_PINS: Final = 4096

#: Stale ends that are not worth a sweep.
_SLACK: Final = 64


@dataclass(frozen=True, slots=True)
class _Pin:
    """One pin; `stamp` tells it from earlier ones of the same tokens."""

    key: bytes
    node: RadixNode
    stamp: int


class Pins:
    """Knows each pinned node by what was pinned, and the order in which pins end.

    A pin is a wish, not a lock: eviction passes over a pinned leaf while anything else can go, and takes those whose
    pin would end first otherwise. So pins never keep a request waiting.

    A pin is found by a digest of its namespace and tokens, so it costs the same for any length of prompt; ends of pins
    that were removed or made anew are swept out when they outnumber the others.

    Args:
        max_pins: how many there may be.
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
        """Ends it keeps, those of earlier pins included: at most two for each pin, and a few."""
        return len(self._ends)

    def nodes(self) -> Iterator[RadixNode]:
        """Yield the node of every pin."""
        return (pin.node for pin in self._pins.values())

    def has_room(self, namespace: str, tokens: bytes) -> bool:
        """Say whether these tokens may be pinned: they are already, or there are not too many pins."""
        return len(self._pins) < self._max_pins or _key(namespace, tokens) in self._pins

    def add(self, namespace: str, tokens: bytes, node: RadixNode, ends_s: float) -> RadixNode | None:
        """Pin a node until a clock reading, in place of an earlier pin of the same tokens; returns that one's node."""
        previous = self.remove(namespace, tokens)
        node.num_pins += 1
        pin = _Pin(_key(namespace, tokens), node, next(self._stamps))
        self._pins[pin.key] = pin
        heappush(self._ends, (ends_s, pin.stamp, pin))
        return previous

    def remove(self, namespace: str, tokens: bytes) -> RadixNode | None:
        """End a pin; returns the node it was on, or None when there is no such pin."""
        return self._remove(_key(namespace, tokens))

    def pop_ended(self, now: float) -> RadixNode | None:
        """End the pin that ends first, if its time has come; returns its node."""
        self._drop_stale()
        return self.pop_first() if self._ends and self._ends[0][0] <= now else None

    def pop_first(self) -> RadixNode | None:
        """End the pin that ends first, even before its time; returns its node."""
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
        """Forget the first ends as long as they are of pins that were removed or made anew."""
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
