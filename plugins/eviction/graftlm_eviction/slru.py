"""Segmented LRU: what was found again is protected from what came once."""

from pydantic import Field

from graftlm.contracts import EvictionContext, EvictionStrategy, NodeStats, Options

__all__ = ["SegmentedLRU", "SegmentedLRUOptions"]

#: A hit in this newest part of the protected segment moves nothing.
_SETTLED_SHARE = 0.25


class SegmentedLRUOptions(Options):
    """Options of `slru`."""

    protected_share: float = Field(
        default=0.2,
        gt=0.0,
        lt=1.0,
        description="Share of the cache's capacity that is protected: kept for tokens that were found at least once.",
    )


class SegmentedLRU(EvictionStrategy):
    """Evicts from a probationary segment first; a hit moves a node into a protected segment of bounded size.

    After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (IEEE Computer 27(3), 1994).
    A scan, however long, passes through probation and evicts nothing that is protected.

    There, what enters a full protected segment pushes the least recently used out of it, to the young end of probation.
    Here a hook may move no node but its own, so each node is told on entering when it will leave. A clock counts the
    tokens that enter the protected segment, and stands still otherwise. With S protected tokens:

        probation                clock                                        clock + S
        ---[ x ]-[ y ]-[ new ]-----|---[ a ]-----[   b   ]--------[ c ][  d  ]---|--- next to enter
                                   |<-              protected                  ->|

    What enters takes the range of its tokens behind `clock + S`, and the clock advances by as many; nobody else moves.
    When the clock has passed the start of a node's range, S tokens have entered after it: it is on probation, between
    those that were new before that and those that come later, as if it had been demoted now. Ranges never overlap, so
    at most S tokens are protected, and each hook costs O(1).

    A node that enters again leaves its old range empty, and the segment holds less than S. So a node in the newest
    quarter of the segment stays where it is (as InnoDB leaves young pages in their place), and a prompt that every
    request uses does not push out the others.
    """

    def __init__(self, options: SegmentedLRUOptions, context: EvictionContext) -> None:
        self._protected_tokens = max(1, int(options.protected_share * context.total_pages * context.page_size))
        self._settled_tokens = int(_SETTLED_SHARE * self._protected_tokens)
        self._clock = 0  # tokens that have entered the protected segment
        self._places: dict[NodeStats, int] = {}

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (place on the clock of protected tokens, last access)."""
        return (self._places[node], node.last_access)

    def is_protected(self, node: NodeStats) -> bool:
        """Return whether the node is in the protected segment."""
        return self._places[node] >= self._clock

    def on_insert(self, node: NodeStats) -> None:
        """Put a new node on probation; the upper half of a node that was hit is protected like it."""
        self._places[node] = self._youngest_on_probation
        if node.hits:
            self._protect(node)

    def on_hit(self, node: NodeStats) -> None:
        """Protect the node, from now on for as long as S tokens take to enter after it."""
        newest = self._clock + self._protected_tokens - self._settled_tokens
        if self._places[node] <= newest:
            self._protect(node)

    def on_evict(self, node: NodeStats) -> None:
        """Forget the node's place."""
        del self._places[node]

    @property
    def _youngest_on_probation(self) -> int:
        return self._clock - 1

    def _protect(self, node: NodeStats) -> None:
        if node.tokens > self._protected_tokens:  # it fits on probation only
            self._places[node] = self._youngest_on_probation
            return
        self._places[node] = self._clock + self._protected_tokens
        self._clock += node.tokens
