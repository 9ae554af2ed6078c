"""The evictable leaves of a radix tree, in a lazily updated heap: no eviction scans them."""

import itertools
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from graftlm.contracts import EvictionStrategy
from graftlm_cache.node import RadixNode

__all__ = ["LeafHeap"]

#: Priority, stamp, node. Stamps are unique, so that nodes are never compared.
_Entry: TypeAlias = tuple[tuple[float, ...], int, RadixNode]

#: Stale entries that are not worth a compaction.
_SLACK = 64

#: Touched leaves that `settle_many` leaves to the next pop.
_MANY = 256


class LeafHeap:
    """Pops evictable leaves that nobody pinned, lowest priority first; equal ones in the order they were touched.

    A node whose priority may have changed is only noted; its priority is computed before the next pop, once, however
    often it was touched. A node that stops being an evictable leaf, or is touched, loses its stamp, which makes its
    entry in the heap stale; stale entries are skipped when popped, and swept out when they outnumber the others.
    So a touch costs O(1), and k pops of n leaves cost O((k + touched) log n). Call `settle_many` now and then, and no
    single pop has to order all that was touched since the last one.
    """

    def __init__(self, strategy: EvictionStrategy) -> None:
        self._strategy = strategy
        self._entries: list[_Entry] = []
        self._awaiting: list[RadixNode] = []
        self._stamps = itertools.count()
        self._num_valid = 0

    @property
    def num_entries(self) -> int:
        """Entries in the heap, stale ones included: after a pop, at most two for each evictable leaf, and a few."""
        return len(self._entries)

    def touch(self, node: RadixNode) -> None:
        """Note that the node may be an evictable leaf whose priority is not known."""
        if node.heap_stamp is not None:
            node.heap_stamp = None
            self._num_valid -= 1
        if not node.awaits_entry:
            node.awaits_entry = True
            self._awaiting.append(node)

    def discard(self, node: RadixNode) -> None:
        """Note that the node is no evictable leaf."""
        if node.heap_stamp is not None:
            node.heap_stamp = None
            self._num_valid -= 1

    def pop(self) -> RadixNode | None:
        """Take out the evictable leaf of the lowest priority; None if there is none."""
        self._settle()
        while self._entries:
            _, stamp, node = heappop(self._entries)
            if node.heap_stamp == stamp:
                self.discard(node)
                return node
        return None

    def settle_many(self) -> None:
        """Give touched leaves their entries if many wait for one. Their stats and hooks must be up to date."""
        if len(self._awaiting) >= _MANY:
            self._settle()

    def _settle(self) -> None:
        """Give every touched leaf its entry."""
        if not self._awaiting:
            return
        candidates = [node for node in self._take_awaiting() if node.is_evictable_leaf and not node.num_pins]
        fresh = [self._new_entry(node) for node in candidates]
        self._num_valid += len(fresh)
        if len(fresh) > len(self._entries) or len(self._entries) + len(fresh) > 2 * self._num_valid + _SLACK:
            # Either way the cost is O(what was touched, or went stale, since this last happened).
            self._entries = [entry for entry in self._entries if entry[2].heap_stamp == entry[1]] + fresh
            heapify(self._entries)
            return
        for entry in fresh:
            heappush(self._entries, entry)

    def _take_awaiting(self) -> list[RadixNode]:
        nodes, self._awaiting = self._awaiting, []
        for node in nodes:
            node.awaits_entry = False
        return nodes

    def _new_entry(self, node: RadixNode) -> _Entry:
        node.heap_stamp = stamp = next(self._stamps)
        return self._strategy.priority(node.stats), stamp, node
