"""The conformance kit of eviction strategies."""

import gc
import math
import random
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any, ClassVar

from graftlm.contracts import EvictionContext, EvictionStrategy, NodeStats
from graftlm.testing.cache_rig import CacheRig
from graftlm.testing.conformance import Conformance
from graftlm.testing.naive_cache import NaiveCache

__all__ = ["EvictionStrategyConformance"]


class _TrackedStats(NodeStats):
    """Stats that allow weak references, so that a test can check that they are freed."""

    __slots__ = ("__weakref__",)


class EvictionStrategyConformance(Conformance, ABC):
    """The kit for the contract `EvictionStrategy`, which tests a strategy without and with a cache.

        class TestMyStrategy(EvictionStrategyConformance):
            def create(self, context):
                return MyStrategy()

    `test_a_cache_works_with_it` needs the `hypothesis` package.

    Attributes:
        parameters: `seed` determines the random nodes and their histories.
        max_examples: number of random sequences of cache calls of each length that `test_a_cache_works_with_it` runs.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"seed": (0, 1, 2)}
    max_examples: ClassVar[int] = 25

    @abstractmethod
    def create(self, context: EvictionContext) -> EvictionStrategy:
        """Return a new strategy."""

    def strategy(self) -> EvictionStrategy:
        """Return a new strategy for a small cache, created by `create`."""
        return self.create(EvictionContext(total_pages=64, page_size=1))

    def test_priority_is_pure(self, seed: int) -> None:
        """Two calls with unchanged stats and no hook between them return equal tuples, and have no effects."""
        strategy = self.strategy()
        nodes = _History(strategy, seed).run(num_steps=100)
        for node in nodes:
            before = astuple(node)
            first = strategy.priority(node)
            for other in nodes:
                strategy.priority(other)
            assert strategy.priority(node) == first, f"two calls return different priorities for {node}"
            assert astuple(node) == before, "priority() changed the node's stats"

    def test_priorities_compare_with_each_other(self, seed: int) -> None:
        """Priorities of one strategy are tuples that can be compared with each other, for all stats."""
        strategy = self.strategy()
        priorities = [strategy.priority(node) for node in _History(strategy, seed).run(num_steps=100)]
        for priority in priorities:
            assert isinstance(priority, tuple), f"priority() returned {type(priority).__name__}, expected a tuple"
            assert priority, "priority() returned an empty tuple, which has no order"
            assert not any(math.isnan(part) for part in priority), (
                f"{priority} contains a NaN, which cannot be compared"
            )
        ordered = sorted(priorities)
        assert all(low <= high for low, high in pairwise(ordered))

    def test_a_priority_changes_only_through_its_own_node(self, seed: int) -> None:
        """A node's priority changes only through its own stats, or through a hook called for it."""
        strategy = self.strategy()
        history = _History(strategy, seed)
        history.run(num_steps=30)
        watched = history.insert()
        priority = strategy.priority(watched)
        for _ in range(200):
            history.step(exclude=watched)
            assert strategy.priority(watched) == priority, "the priority changed without a hook for the node"

    def test_no_stats_raise(self, seed: int) -> None:
        """No method raises for any stats a cache can produce."""
        strategy = self.strategy()
        for node in _extreme_stats():
            strategy.on_insert(node)
            strategy.priority(node)
            node.hits += 1
            strategy.on_hit(node)
            strategy.priority(node)
            strategy.on_evict(node)
        _History(strategy, seed).run(num_steps=500)

    def test_state_ends_with_the_node(self, seed: int) -> None:
        """A strategy drops the state of a node in `on_evict`."""
        strategy = self.strategy()
        _History(strategy, seed).run(num_steps=50)
        node = _TrackedStats(created=1.0, last_access=1.0, tokens=8)
        alive = weakref.ref(node)
        strategy.on_insert(node)
        node.hits += 1
        strategy.on_hit(node)
        strategy.priority(node)
        strategy.on_evict(node)
        del node
        gc.collect()
        assert alive() is None, "the strategy still refers to a node that was evicted"

    def test_a_cache_works_with_it(self) -> None:
        """A cache with this strategy satisfies all its invariants after every step of random histories."""
        from graftlm.testing.prefix_cache_machine import check_random_histories

        check_random_histories(lambda: CacheRig(NaiveCache, 4, self.strategy()), self.max_examples)


class _History:
    """A simulated cache without content: its nodes have inserts, hits, splits and evictions, and it calls the hooks."""

    def __init__(self, strategy: EvictionStrategy, seed: int) -> None:
        self._strategy = strategy
        self._random = random.Random(seed)
        self._now = 0.0
        self._nodes: list[NodeStats] = []

    def run(self, num_steps: int) -> list[NodeStats]:
        """Make random steps, and call `priority` after each step; return the nodes that exist at the end."""
        for _ in range(num_steps):
            self.step()
            for node in self._nodes[-1:]:
                self._strategy.priority(node)
        return [*self._nodes, self.insert()]

    def step(self, exclude: NodeStats | None = None) -> None:
        """Make one random change to a random node other than `exclude`, or insert a node."""
        self._now += self._random.choice([0.0, 0.001, 1.0, 3600.0])
        nodes = [node for node in self._nodes if node is not exclude]
        change = self._random.choice([self._hit, self._hit, self._split, self._evict])
        if nodes and self._random.random() < 0.8:
            change(self._random.choice(nodes))
        else:
            self.insert()

    def insert(self) -> NodeStats:
        """Insert a new node and return it."""
        node = NodeStats(
            created=self._now,
            last_access=self._now,
            tokens=self._random.choice([1, 16, 5000]),
            depth=self._random.choice([0, 16, 100_000]),
            priority=self._random.randrange(-2, 3),
        )
        self._announce(node)
        return node

    def _announce(self, node: NodeStats) -> None:
        self._nodes.append(node)
        self._strategy.on_insert(node)

    def _hit(self, node: NodeStats) -> None:
        node.last_access = self._now
        node.hits += 1
        node.priority = max(node.priority, self._random.randrange(-2, 3))
        self._strategy.on_hit(node)

    def _split(self, node: NodeStats) -> None:
        if node.tokens < 2:
            return
        num_upper = self._random.randrange(1, node.tokens)
        upper = replace(node, tokens=num_upper)
        node.tokens -= num_upper
        node.depth += num_upper
        self._announce(upper)

    def _evict(self, node: NodeStats) -> None:
        self._nodes.remove(node)
        self._strategy.on_evict(node)


def _extreme_stats() -> list[NodeStats]:
    return [
        NodeStats(created=0.0, last_access=0.0, tokens=1),
        NodeStats(created=-1e9, last_access=1e18, hits=2**62, tokens=2**31, depth=2**31, priority=2**62),
        NodeStats(created=1e18, last_access=1e18, tokens=1, depth=2**31, priority=-(2**62)),
    ]
