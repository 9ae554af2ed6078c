"""The evictable leaves of a radix tree, in a lazily updated heap of sorted runs: no eviction scans them."""

import itertools
import logging
import reprlib
from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

import numpy as np

from graftlm.contracts import EvictionStrategy
from graftlm_cache.node import RadixNode

__all__ = ["LeafHeap"]

logger = logging.getLogger(__name__)

#: Priority, stamp, node. Stamps are unique, so that nodes are never compared.
_Entry: TypeAlias = tuple[tuple[float, ...], int, RadixNode]
#: The lowest entry of a run, and the rest of the run, highest first.
_Head: TypeAlias = tuple[tuple[float, ...], int, RadixNode, list[_Entry]]

#: What a priority may be made of; all of them compare with each other.
_NUMBERS = (int, float, np.integer, np.floating)

#: Stale entries that are not worth a sweep.
_SLACK = 64

#: Touched leaves that `settle_many` leaves to the next pop, and entries that make a run.
_MANY = 256


class LeafHeap:
    """Pops evictable leaves that nobody pinned, lowest priority first; equal ones in the order they were touched.

        touched leaves --settle--> young heap (few) --sort--> runs (many leaves each), in a heap of their lowest entries

    A node whose priority may have changed is only noted; its priority is computed before the next pop, once, however
    often it was touched. A node that stops being an evictable leaf, or is touched, loses its stamp, which makes its
    entry stale; stale entries are skipped when they come up, and swept out when they outnumber the others.

    So a touch costs O(1), and k pops of n leaves cost O((k + touched) log n). The heaps stay small: one of 50,000
    entries would be walked from top to bottom at each pop, through memory that is in no processor cache; a run is read
    in order. Call `settle_many` now and then, and no single pop has to order all that was touched since the last one.
    """

    def __init__(self, strategy: EvictionStrategy) -> None:
        self._strategy = strategy
        self._young: list[_Entry] = []
        self._heads: list[_Head] = []
        self._awaiting: list[RadixNode] = []
        self._stamps = itertools.count()
        self._num_entries = 0
        self._num_valid = 0
        self._told_faults: set[str] = set()  # of the strategy, by kind

    @property
    def num_entries(self) -> int:
        """Entries, stale ones included: after a pop, at most two for each evictable leaf, and a few."""
        return self._num_entries

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
        if self._awaiting:
            self._settle()
        while self._num_valid:
            stamp, node = self._take_lowest()
            if node.heap_stamp == stamp:
                node.heap_stamp = None
                self._num_valid -= 1
                return node
        return None

    def settle_many(self) -> None:
        """Give touched leaves their entries if many wait for one. Their stats and hooks must be up to date."""
        if len(self._awaiting) >= _MANY:
            self._settle()

    def _take_lowest(self) -> tuple[int, RadixNode]:
        """Take out the lowest entry, stale or not."""
        self._num_entries -= 1
        if self._young and (not self._heads or self._young[0] < self._heads[0]):
            return heappop(self._young)[1:]
        _, stamp, node, run = self._heads[0]
        if run:
            heapreplace(self._heads, (*run.pop(), run))
        else:
            heappop(self._heads)
        return stamp, node

    def _settle(self) -> None:
        """Give every touched leaf its entry."""
        fresh = [
            self._new_entry(node) for node in self._take_awaiting() if node.is_evictable_leaf and not node.num_pins
        ]
        self._num_valid += len(fresh)
        self._num_entries += len(fresh)
        if self._num_entries > 2 * self._num_valid + _SLACK:
            self._sweep(fresh)
        elif len(fresh) >= _MANY:
            self._add_run(fresh)
        else:
            for entry in fresh:
                heappush(self._young, entry)
            if len(self._young) >= _MANY:
                young, self._young = self._young, []
                self._add_run(young)

    def _sweep(self, fresh: list[_Entry]) -> None:
        """Put all entries that are not stale into one run. The cost is O(what went stale since), but for the sort."""
        entries = self._young + fresh
        for priority, stamp, node, run in self._heads:
            entries.append((priority, stamp, node))
            entries += run
        self._young, self._heads = [], []
        self._add_run([entry for entry in entries if entry[2].heap_stamp == entry[1]])
        self._num_entries = self._num_valid

    def _add_run(self, entries: list[_Entry]) -> None:
        entries.sort(reverse=True)
        if entries:
            heappush(self._heads, (*entries.pop(), entries))

    def _take_awaiting(self) -> list[RadixNode]:
        nodes, self._awaiting = self._awaiting, []
        for node in nodes:
            node.awaits_entry = False
        return nodes

    def _new_entry(self, node: RadixNode) -> _Entry:
        priority = self._priority(node)
        node.heap_stamp = stamp = next(self._stamps)
        return priority, stamp, node

    def _priority(self, node: RadixNode) -> tuple[float, ...]:
        """Ask the strategy; an answer that has no place in an order is taken for the lowest: an empty tuple."""
        try:
            priority = self._strategy.priority(node.stats)
        except Exception as error:
            self._tell_fault(f"failed with {type(error).__name__}", error)
            return ()
        if type(priority) is tuple:
            for value in priority:
                if not isinstance(value, _NUMBERS) or value != value:  # NaN alone differs from itself
                    break
            else:
                return priority
        self._tell_fault(f"gave {reprlib.repr(priority)}, expected a tuple of numbers, none of them NaN", kind="answer")
        return ()

    def _tell_fault(self, what: str, error: Exception | None = None, kind: str | None = None) -> None:
        """Log what the strategy did wrong, once for each kind."""
        kind = kind or what
        if kind not in self._told_faults:
            self._told_faults.add(kind)
            logger.error(
                "eviction strategy %s: priority() %s; the node goes first. Further faults of this kind are not logged.",
                type(self._strategy).__name__,
                what,
                exc_info=error,
            )
