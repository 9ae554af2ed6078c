"""Which nodes of a radix tree have window pages, who keeps them, and the order in which they are given up."""

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from graftlm.errors import InvariantError
from graftlm_cache.node import RadixNode

__all__ = ["WindowCover"]

#: When the node's window was used last, where the node ends, its id, the node.
_Entry: TypeAlias = tuple[int, int, int, RadixNode]

#: Stale entries that are not worth a compaction.
_SLACK = 64


class WindowCover:
    """Tells covered nodes from bare ones. A node's pages all have window pages, or none has.

    Covered nodes that nobody locks wait in the order in which their windows were last used, and of windows used at the
    same time the one in front goes first. Using a window is locking it: a request that goes on far below a node does
    not use the node's window pages, however often it passes the node.

    An entry of the heap is stale when its node was used later, locked or bared; stale entries are skipped, and swept
    out when they outnumber the others. So all that is done here costs O(log n).

    Attributes:
        evictable_pages: pages of covered nodes that nobody locks.
    """

    def __init__(self) -> None:
        self.evictable_pages = 0
        self._covered: set[RadixNode] = set()
        self._num_locks: dict[RadixNode, int] = {}  # none that are 0
        self._last_use: dict[RadixNode, int] = {}  # of covered nodes that nobody locks
        self._heap: list[_Entry] = []
        self._now = 0

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._covered

    def tick(self) -> None:
        """Let time pass: what is used from now on was used later."""
        self._now += 1

    def add(self, node: RadixNode) -> None:
        """Note that a bare node has window pages now."""
        self._covered.add(node)
        if node not in self._num_locks:
            self._enqueue(node, self._now)
            self.evictable_pages += node.num_own_pages

    def remove(self, node: RadixNode) -> None:
        """Note that a node that nobody locks has no window pages any more; a bare one stays as it is."""
        if node in self._covered:
            self._dequeue(node)
            self._covered.remove(node)

    def lock(self, node: RadixNode) -> None:
        """Keep a node's window pages; a bare node gets its lock all the same."""
        num_locks = self._num_locks.get(node, 0)
        if num_locks == 0 and node in self._covered:
            self._dequeue(node)
        self._num_locks[node] = num_locks + 1

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: there is none to undo.
        """
        num_locks = self._num_locks.get(node, 0)
        if num_locks == 0:
            raise InvariantError(
                f"swa_radix cache: the window at page {node.num_pages} is unlocked, but nobody holds it. "
                "Unlock a window as often, and as far, as it was locked."
            )
        if num_locks > 1:
            self._num_locks[node] = num_locks - 1
            return
        del self._num_locks[node]
        if node in self._covered:
            self._enqueue(node, self._now)
            self.evictable_pages += node.num_own_pages

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Note that `upper` was split off the front of `lower`: both are as `lower` was."""
        if lower in self._num_locks:
            self._num_locks[upper] = self._num_locks[lower]
        if lower in self._covered:
            self._covered.add(upper)
            if lower in self._last_use:
                self._enqueue(upper, self._last_use[lower])

    def oldest(self, spared: Collection[RadixNode]) -> RadixNode | None:
        """Return the covered, unlocked node whose window was used longest ago; a spared one only if all are spared."""
        passed: list[_Entry] = []
        while self._heap and (self._is_stale(self._heap[0]) or self._heap[0][3] in spared):
            entry = heappop(self._heap)
            if not self._is_stale(entry):
                passed.append(entry)
        first = self._heap or passed
        node = first[0][3] if first else None
        for entry in passed:
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
