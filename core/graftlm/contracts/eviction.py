"""The contract of an eviction strategy: in which order cached leaves are given up."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["EvictionContext", "EvictionStrategy", "NodeStats"]


@dataclass(slots=True, eq=False)
class NodeStats:
    """What a strategy may know of one cached run of tokens. The cache writes it, strategies read it.

    A node keeps one `NodeStats` object for life, and it hashes by identity: it is the key for per-node state.

    Attributes:
        created: clock reading, in seconds, when the node was inserted.
        last_access: clock reading, in seconds, of its latest insert or match.
        hits: how many matches ran through it; a request counts once, however many chunks its prompt takes.
        tokens: tokens the node itself holds.
        depth: tokens in front of it, from the start of the prompt.
        priority: highest priority of the requests that used it; higher is more important.
    """

    created: float
    last_access: float
    hits: int = 0
    tokens: int = 0
    depth: int = 0
    priority: int = 0

    @property
    def prefill_cost(self) -> float:
        """Relative cost of computing this node's tokens again, in units of one token without context.

        A token at position p costs a constant (the linear layers) and p times a little (attention over what
        stands before it). With width d and the usual shapes the two meet near p = 6 d; 8,192 stands for that.
        """
        mean_position = self.depth + (self.tokens - 1) / 2
        return self.tokens * (1.0 + mean_position / 8192.0)


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """What a strategy is created with.

    Attributes:
        total_pages: pages the cache may hold at most, all of them evictable.
        page_size: tokens in a page.
    """

    total_pages: int
    page_size: int


class EvictionStrategy(ABC):
    """Orders evictable leaves; the lowest priority goes first.

    Invariants, each checked by `graftlm.testing.EvictionStrategyConformance`:
        - `priority` is pure: two calls with unchanged stats and no hook between them return equal tuples, and it
          changes nothing.
        - Priorities of one strategy are tuples that compare with each other for all stats.
        - A node's priority changes only through its own stats, or through a hook called for it. (The cache relies on
          this: it recomputes a priority when it touched the node, not at each eviction.)
        - No method raises for any stats a cache can produce.

    For each node the cache calls `on_insert` first and `on_evict` last, once each; a strategy that keeps per-node state
    drops it in `on_evict`.
    """

    @abstractmethod
    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return the node's place in the order; the lowest is evicted first."""

    def on_insert(self, node: NodeStats) -> None:
        """Learn of a new node. A split reports its new upper half here."""

    def on_hit(self, node: NodeStats) -> None:
        """Learn that a match ran through the node; `node.hits` already counts it."""

    def on_evict(self, node: NodeStats) -> None:
        """Learn that the node is gone."""
