"""Stand-ins that a cache is tested with: a clock that ticks, and a strategy that watches how it is called."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["OldestAccessFirst", "RecordingStrategy", "RestlessOrder", "TickingClock"]


class TickingClock:
    """A clock that moves on by one second whenever it is read, so that no two moments are equal."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the next second."""
        self.now += 1.0
        return self.now


class OldestAccessFirst(EvictionStrategy):
    """The plainest order that tells whether a cache keeps `last_access`."""

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access)."""
        return (node.last_access,)


class RestlessOrder(EvictionStrategy):
    """An order in which every touch and every split moves a node: it finds caches that sort by old figures."""

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (parity of hits, tokens modulo 3, latest access first)."""
        return (node.hits % 2, node.tokens % 3, -node.last_access)


class RecordingStrategy(EvictionStrategy):
    """Passes every call on to another strategy, and fails at once when a cache calls out of order.

    Attributes:
        live: nodes that were inserted and not evicted yet.
        evicted: nodes that left, in order; the test may clear it.
        num_hits: calls of `on_hit` so far.
        num_priorities: calls of `priority` so far.
    """

    def __init__(self, inner: EvictionStrategy | None = None) -> None:
        self._inner = inner or OldestAccessFirst()
        self.live: set[NodeStats] = set()
        self.evicted: list[NodeStats] = []
        self.num_hits = 0
        self.num_priorities = 0

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return the other strategy's priority of a live node."""
        assert node in self.live, "priority() was asked for a node that on_insert() never announced, or that is evicted"
        self.num_priorities += 1
        return self._inner.priority(node)

    def on_insert(self, node: NodeStats) -> None:
        """Expect a node that is not live."""
        assert node not in self.live, "on_insert() was called twice for a node"
        self.live.add(node)
        self._inner.on_insert(node)

    def on_hit(self, node: NodeStats) -> None:
        """Expect a live node whose hits count this one."""
        assert node in self.live, "on_hit() was called for a node that on_insert() never announced, or that is evicted"
        assert node.hits > 0, "on_hit() was called before the hit was counted"
        self.num_hits += 1
        self._inner.on_hit(node)

    def on_evict(self, node: NodeStats) -> None:
        """Expect a live node, for the last time."""
        assert node in self.live, "on_evict() was called for a node that on_insert() never announced, or twice"
        self.live.remove(node)
        self.evicted.append(node)
        self._inner.on_evict(node)
