"""Test doubles for tests of caches: a clock, simple eviction strategies, and a strategy that checks its calls."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["OldestAccessFirst", "RecordingStrategy", "RestlessOrder", "TickingClock"]


class TickingClock:
    """A clock that advances by one second at each reading, so that no two readings are equal.

    Attributes:
        now: the last reading, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Advance the clock by one second and return its time."""
        self.now += 1.0
        return self.now


class OldestAccessFirst(EvictionStrategy):
    """A strategy that evicts the least recently used node first, for tests that a cache updates `last_access`."""

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access)."""
        return (node.last_access,)


class RestlessOrder(EvictionStrategy):
    """A strategy in which every access and every split of a node changes the node's priority.

    It detects caches that sort nodes by outdated priorities.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (parity of hits, tokens modulo 3, latest access first)."""
        return (node.hits % 2, node.tokens % 3, -node.last_access)


class RecordingStrategy(EvictionStrategy):
    """A strategy that forwards every call to another one, and raises AssertionError for calls in a wrong order.

    Args:
        inner: the other strategy; None: `OldestAccessFirst`.

    Attributes:
        live: inserted nodes that are not evicted yet.
        evicted: evicted nodes, in order. A test may clear the list.
        num_hits: number of calls of `on_hit` so far.
        num_priorities: number of calls of `priority` so far.
    """

    def __init__(self, inner: EvictionStrategy | None = None) -> None:
        self._inner = inner or OldestAccessFirst()
        self.live: set[NodeStats] = set()
        self.evicted: list[NodeStats] = []
        self.num_hits = 0
        self.num_priorities = 0

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return the other strategy's priority of a node, which must be live."""
        assert node in self.live, "priority() was called for a node without an on_insert() before, or after on_evict()"
        self.num_priorities += 1
        return self._inner.priority(node)

    def on_insert(self, node: NodeStats) -> None:
        """Record a node as live. The node must not be live yet."""
        assert node not in self.live, "on_insert() was called twice for a node"
        self.live.add(node)
        self._inner.on_insert(node)

    def on_hit(self, node: NodeStats) -> None:
        """Count a hit of a live node, whose `hits` must already include this hit."""
        assert node in self.live, "on_hit() was called for a node without an on_insert() before, or after on_evict()"
        assert node.hits > 0, "on_hit() was called before the cache counted the hit"
        self.num_hits += 1
        self._inner.on_hit(node)

    def on_evict(self, node: NodeStats) -> None:
        """Record the eviction of a live node."""
        assert node in self.live, "on_evict() was called twice for a node, or without an on_insert() before"
        self.live.remove(node)
        self.evicted.append(node)
        self._inner.on_evict(node)
