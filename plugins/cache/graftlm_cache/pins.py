"""The pins of a radix tree: prefixes somebody asked to keep for a while, and when that while ends."""

import itertools
from collections.abc import Iterator
from heapq import heappop, heappush

from graftlm_cache.node import RadixNode

__all__ = ["Pins"]


class Pins:
    """Knows each pinned node by what was pinned, and the order in which pins end.

    A pin is a wish, not a lock: eviction passes over a pinned leaf while anything else can go, and takes those whose
    pin would end first otherwise. So pins never keep a request waiting.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, bytes], tuple[RadixNode, int]] = {}
        self._ends: list[tuple[float, int, tuple[str, bytes]]] = []
        self._stamps = itertools.count()

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> Iterator[RadixNode]:
        """Yield the node of every pin."""
        return (node for node, _ in self._nodes.values())

    def add(self, namespace: str, tokens: bytes, node: RadixNode, ends_s: float) -> RadixNode | None:
        """Pin a node until a clock reading, in place of an earlier pin of the same tokens; returns that one's node."""
        previous = self.remove(namespace, tokens)
        node.num_pins += 1
        stamp = next(self._stamps)
        self._nodes[namespace, tokens] = (node, stamp)
        heappush(self._ends, (ends_s, stamp, (namespace, tokens)))
        return previous

    def remove(self, namespace: str, tokens: bytes) -> RadixNode | None:
        """End a pin; returns the node it was on, or None when there is no such pin."""
        node, _ = self._nodes.pop((namespace, tokens), (None, 0))
        if node is not None:
            node.num_pins -= 1
        return node

    def pop_ended(self, now: float) -> RadixNode | None:
        """End the pin that ends first, if its time has come; returns its node."""
        self._drop_stale()
        return self.pop_first() if self._ends and self._ends[0][0] <= now else None

    def pop_first(self) -> RadixNode | None:
        """End the pin that ends first, even before its time; returns its node."""
        self._drop_stale()
        return self.remove(*heappop(self._ends)[2]) if self._ends else None

    def clear(self) -> None:
        """End every pin."""
        for node, _ in self._nodes.values():
            node.num_pins -= 1
        self._nodes.clear()
        self._ends.clear()

    def _drop_stale(self) -> None:
        """Forget ends of pins that were removed or made anew."""
        while self._ends and self._nodes.get(self._ends[0][2], (None, -1))[1] != self._ends[0][1]:
            heappop(self._ends)
