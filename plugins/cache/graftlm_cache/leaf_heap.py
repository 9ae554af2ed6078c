"""The evictable leaves of a radix tree, in a lazily updated heap of sorted runs. Evictions do not scan all leaves."""

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

#: An entry: priority, stamp, node. Stamps are unique, so that nodes are never compared.
_Entry: TypeAlias = tuple[tuple[float, ...], int, RadixNode]
#: A run: the priority, stamp and node of its lowest entry, then its other entries, highest first.
_Head: TypeAlias = tuple[tuple[float, ...], int, RadixNode, list[_Entry]]

#: The types of the numbers of a priority; all of them can be compared with each other.
_NUMBERS = (int, float, np.integer, np.floating)

#: Stale entries are removed only if there are more than this number.
_SLACK = 64

#: Minimum number of touched leaves with which `settle_many` creates entries; also the minimum size of a run.
_MANY = 256


class LeafHeap:
    """Pops evictable leaves without pins, lowest priority first; equal priorities in the order of their touches.

        touched leaves --settle--> young heap (few) --sort--> runs (many leaves each), in a heap of their lowest entries

    Touching a node only records that its priority may have changed. The priority is computed once, before the next pop,
    even if the node was touched often. A node that is touched, or is no longer an evictable leaf, loses its stamp. This
    makes its entry stale. Stale entries are skipped by pops, and are removed together ("sweep") when they outnumber the
    valid ones.

    A touch costs O(1), and k pops of n leaves cost O((k + touched) log n). Both heaps stay small: a pop from a heap of
    50,000 entries would read memory outside the processor's caches at every level. A run, however, is read in order.
    Call `settle_many` regularly, so that a single pop does not have to sort all nodes touched since the last pop.
    """

    def __init__(self, strategy: EvictionStrategy) -> None:
        self._strategy = strategy
        self._young: list[_Entry] = []
        self._heads: list[_Head] = []
        self._awaiting: list[RadixNode] = []
        self._stamps = itertools.count()
        self._num_entries = 0
        self._num_valid = 0
        self._logged_faults: set[str] = set()  # kinds of faults of the strategy

    @property
    def num_entries(self) -> int:
        """Number of entries, including stale ones; after a pop, at most two per evictable leaf plus a constant."""
        return self._num_entries

    def touch(self, node: RadixNode) -> None:
        """Record that the node may be an evictable leaf whose priority must be computed."""
        if node.heap_stamp is not None:
            node.heap_stamp = None
            self._num_valid -= 1
        if not node.awaits_entry:
            node.awaits_entry = True
            self._awaiting.append(node)

    def discard(self, node: RadixNode) -> None:
        """Record that the node is not an evictable leaf."""
        if node.heap_stamp is not None:
            node.heap_stamp = None
            self._num_valid -= 1

    def pop(self) -> RadixNode | None:
        """Remove and return the evictable leaf of the lowest priority; None if there is none."""
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
        """Create the entries of touched leaves if there are many. The statistics of the leaves must be up to date."""
        if len(self._awaiting) >= _MANY:
            self._settle()

    def _take_lowest(self) -> tuple[int, RadixNode]:
        """Remove the lowest entry, stale or not. Return its stamp and node."""
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
        """Create the entry of every touched leaf."""
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
        """Put all valid entries into one run. Apart from sorting, the cost is linear in the number of stale entries."""
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
        """Return the strategy's priority; if that fails or cannot be compared, return (), the lowest priority."""
        try:
            priority = self._strategy.priority(node.stats)
        except Exception as error:
            self._log_fault(f"failed with {type(error).__name__}", error)
            return ()
        if type(priority) is tuple:
            for value in priority:
                if not isinstance(value, _NUMBERS) or value != value:  # only NaN differs from itself
                    break
            else:
                return priority
        self._log_fault(f"returned {reprlib.repr(priority)}, expected a tuple of numbers without NaN", kind="result")
        return ()

    def _log_fault(self, what: str, error: Exception | None = None, kind: str | None = None) -> None:
        """Log an error of the strategy, once per kind."""
        kind = kind or what
        if kind not in self._logged_faults:
            self._logged_faults.add(kind)
            logger.error(
                "eviction strategy %s: priority() %s; the node is evicted first. Further errors of this kind are not "
                "logged.",
                type(self._strategy).__name__,
                what,
                exc_info=error,
            )
