"""The window pages of a radix tree's nodes: which nodes have them, their locks, and the order of their eviction."""

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from graftlm.errors import InvariantError
from graftlm_cache.node import RadixNode

__all__ = ["WindowCover"]

#: An entry: time of the last use of a node's window, number of pages up to the node's end, id of the node, the node.
_Entry: TypeAlias = tuple[int, int, int, RadixNode]

#: The heap is compacted only if it has more than this number of stale entries.
_SLACK = 64


class WindowCover:
    """Records which nodes are covered: all pages of a node have window pages, or none has.

    Covered nodes without locks are ordered by the last use of their windows; among windows used at the same time, the
    one nearest to the start of the prompt is first. Only locking counts as a use. A request that matches far beyond a
    node does not use the node's window pages.

    An entry of the heap is stale if its node was used later, locked, or has lost its window pages. Stale entries are
    skipped, and are removed together when they outnumber the valid ones. So each method costs O(log n).

    Attributes:
        evictable_pages: number of pages of covered nodes without locks.
    """

    def __init__(self) -> None:
        self.evictable_pages = 0
        self._covered: set[RadixNode] = set()
        self._num_locks: dict[RadixNode, int] = {}  # only nodes with locks
        self._last_use: dict[RadixNode, int] = {}  # covered node without locks -> time of the last use of its window
        self._heap: list[_Entry] = []
        self._now = 0

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._covered

    def tick(self) -> None:
        """Advance the logical clock, whose time later uses record."""
        self._now += 1

    def add(self, node: RadixNode) -> None:
        """Record that a bare node now has window pages."""
        self._covered.add(node)
        if node not in self._num_locks:
            self._enqueue(node, self._now)
            self.evictable_pages += node.num_own_pages

    def remove(self, node: RadixNode) -> None:
        """Record that a node without locks has lost its window pages; do nothing for a bare node."""
        if node in self._covered:
            self._dequeue(node)
            self._covered.remove(node)

    def lock(self, node: RadixNode) -> None:
        """Protect a node's window pages from eviction; the lock is also counted for a bare node."""
        num_locks = self._num_locks.get(node, 0)
        if num_locks == 0 and node in self._covered:
            self._dequeue(node)
        self._num_locks[node] = num_locks + 1

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: the node is not locked.
        """
        num_locks = self._num_locks.get(node, 0)
        if num_locks == 0:
            raise InvariantError(
                f"swa_radix cache: unlock of the window at page {node.num_pages}, which is not locked. "
                "Unlock a window as often as it was locked, with the same length."
            )
        if num_locks > 1:
            self._num_locks[node] = num_locks - 1
            return
        del self._num_locks[node]
        if node in self._covered:
            self._enqueue(node, self._now)
            self.evictable_pages += node.num_own_pages

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Record that `upper` was split off from the start of `lower`; it gets the same state and locks."""
        if lower in self._num_locks:
            self._num_locks[upper] = self._num_locks[lower]
        if lower in self._covered:
            self._covered.add(upper)
            if lower in self._last_use:
                self._enqueue(upper, self._last_use[lower])

    def oldest(self, pinned: Collection[RadixNode]) -> RadixNode | None:
        """Return the covered, unlocked node whose window was used longest ago; None if there is none.

        Args:
            pinned: nodes that are returned only if there are no others.
        """
        skipped: list[_Entry] = []
        while self._heap and (self._is_stale(self._heap[0]) or self._heap[0][3] in pinned):
            entry = heappop(self._heap)
            if not self._is_stale(entry):
                skipped.append(entry)
        first = self._heap or skipped
        node = first[0][3] if first else None
        for entry in skipped:
            heappush(self._heap, entry)
        return node

    def _enqueue(self, node: RadixNode, used: int) -> None:
        self._last_use[node] = used
        heappush(self._heap, (used, node.num_pages, node.node_id, node))
        if len(self._heap) > 2 * len(self._last_use) + _SLACK:
            self._heap = [(used, node.num_pages, node.node_id, node) for node, used in self._last_use.items()]
            heapify(self._heap)

    def _dequeue(self, node: RadixNode) -> None:
        del self._last_use[node]
        self.evictable_pages -= node.num_own_pages

    def _is_stale(self, entry: _Entry) -> bool:
        return self._last_use.get(entry[3]) != entry[0]
