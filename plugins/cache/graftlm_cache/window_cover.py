"""Which nodes of a radix tree have window pages, who keeps them, and the order in which they are given up."""

from collections import OrderedDict
from collections.abc import Collection

from graftlm.errors import InvariantError
from graftlm_cache.node import RadixNode

__all__ = ["WindowCover"]


class WindowCover:
    """Tells covered nodes from bare ones. A node's pages all have window pages, or none has.

    Covered nodes that nobody locks stand in the order in which their windows were last used, oldest first. Using a
    window is locking it: a request that goes on far below a node does not use the node's window pages, however often
    it passes the node.

    Attributes:
        evictable_pages: pages of covered nodes that nobody locks.
    """

    def __init__(self) -> None:
        self._covered: set[RadixNode] = set()
        self._num_locks: dict[RadixNode, int] = {}  # none that are 0
        self._order: OrderedDict[RadixNode, None] = OrderedDict()
        self.evictable_pages = 0

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._covered

    def add(self, node: RadixNode) -> None:
        """Note that a bare node has window pages now."""
        self._covered.add(node)
        if node not in self._num_locks:
            self._enqueue(node)

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
            self._enqueue(node)

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Note that `upper` was split off the front of `lower`: both are as `lower` was."""
        if lower in self._num_locks:
            self._num_locks[upper] = self._num_locks[lower]
        if lower in self._covered:
            self._covered.add(upper)
            if lower in self._order:  # its pages are counted already
                self._order[upper] = None

    def oldest(self, spared: Collection[RadixNode]) -> RadixNode | None:
        """Return the covered, unlocked node whose window was used longest ago; a spared one only if all are spared."""
        first = next(iter(self._order), None)
        if not spared:
            return first
        return next((node for node in self._order if node not in spared), first)

    def _enqueue(self, node: RadixNode) -> None:
        self._order[node] = None
        self.evictable_pages += node.num_own_pages

    def _dequeue(self, node: RadixNode) -> None:
        del self._order[node]
        self.evictable_pages -= node.num_own_pages
