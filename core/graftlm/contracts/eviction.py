"""The contract of an eviction strategy: the order in which cached leaves are evicted."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["EvictionContext", "EvictionStrategy", "NodeStats"]


@dataclass(slots=True, eq=False)
class NodeStats:
    """Statistics of one node of the cache. The cache writes them, and strategies read them.

    A node has the same `NodeStats` object until its eviction. The object is hashed by identity, so a strategy can use
    it as a dictionary key.

    Attributes:
        created: clock reading in seconds when the node was inserted.
        last_access: clock reading in seconds at the node's latest insert or match.
        hits: number of matches that contained the node. A request is counted once, even if its prompt is prefilled in
            several chunks.
        tokens: number of tokens in the node itself.
        depth: number of tokens before the node, from the start of the prompt.
        priority: highest priority of the requests that used the node; higher is more important.
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

        A token at position p has a constant cost for the linear layers, and a cost proportional to p for attention.
        With hidden size d and the usual shapes, both costs are equal near p = 6 d. The estimate uses 8,192 for 6 d.
        """
        mean_position = self.depth + (self.tokens - 1) / 2
        return self.tokens * (1.0 + mean_position / 8192.0)


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """The arguments of a strategy's `create`.

    Attributes:
        total_pages: maximum number of pages in the cache; all of them may be evictable.
        page_size: number of tokens in a page.
    """

    total_pages: int
    page_size: int


class EvictionStrategy(ABC):
    """Orders evictable leaves; the leaf with the lowest priority is evicted first.

    Invariants, each checked by `graftlm.testing.EvictionStrategyConformance`:
        - `priority` has no effects. Two calls return equal tuples if the stats are unchanged and no other method was
          called in between.
        - All tuples that one strategy returns can be compared with each other.
        - A node's priority changes only when its own stats change or `on_insert`, `on_hit` or `on_evict` is called for
          it. The cache relies on this: it recomputes a node's priority when it changes the node, not at each eviction.
        - Methods do not raise for any stats that a cache can produce.

    For each node, the cache calls `on_insert` first and `on_evict` last, once each. A strategy that keeps per-node
    state deletes it in `on_evict`.
    """

    @abstractmethod
    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return the node's sort key; the lowest is evicted first."""

    def on_insert(self, node: NodeStats) -> None:
        """Handle a new node. If a node is split, this is called for the new upper node."""

    def on_hit(self, node: NodeStats) -> None:
        """Handle a match that contained the node; `node.hits` already counts it."""

    def on_evict(self, node: NodeStats) -> None:
        """Handle the node's eviction."""
