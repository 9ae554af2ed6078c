"""Segmented LRU: leaves that had a hit are protected from leaves that had none."""

from pydantic import Field

from graftlm.contracts import EvictionContext, EvictionStrategy, NodeStats, Options

__all__ = ["SegmentedLRU", "SegmentedLRUOptions"]

#: Share of the protected segment, at its newest end, in which a hit does not move a node.
_SETTLED_SHARE = 0.25


class SegmentedLRUOptions(Options):
    """Options of `slru`."""

    protected_share: float = Field(
        default=0.2,
        gt=0.0,
        lt=1.0,
        description="Size of the protected segment as a share of the cache's capacity; it is for tokens with at least "
        "one hit.",
    )


class SegmentedLRU(EvictionStrategy):
    """Evicts from a probationary segment first. A hit moves a node to a protected segment of limited size.

    The strategy follows Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (IEEE
    Computer 27(3), 1994).
    A scan of any length passes only through the probationary segment, and evicts no protected node.

    In that paper, a node that enters a full protected segment moves the least recently used node of that segment to the
    most recent end of the probationary segment. Here a hook can change only the position of the node that it receives.
    Therefore a node's position at its entry also determines when it leaves. A clock counts the tokens that have entered
    the protected segment. With S protected tokens:

        probation                clock                                        clock + S
        ---[ x ]-[ y ]-[ new ]-----|---[ a ]-----[   b   ]--------[ c ][  d  ]---|--- next to enter
                                   |<-              protected                  ->|

    A node that enters gets the range of positions after `clock + S` that has the length of its tokens, and the clock
    advances by this length. No other node changes its position. When the clock has passed the start of a node's range,
    S tokens have entered after the node. The node is then on probation: after nodes that were inserted earlier, and
    before nodes that will be inserted later, as if it had been demoted at this time. Ranges never overlap, so at most S
    tokens are protected, and each hook costs O(1).

    A node that enters again leaves its old range empty, so the segment then contains fewer than S tokens. To limit
    this, a node in the newest quarter of the segment keeps its position at a hit (InnoDB does the same with young
    pages). So a prompt that every request uses does not displace other prompts.

    Args:
        options: see `SegmentedLRUOptions`.
        context: the cache's capacity.
    """

    def __init__(self, options: SegmentedLRUOptions, context: EvictionContext) -> None:
        self._protected_tokens = max(1, int(options.protected_share * context.total_pages * context.page_size))
        self._settled_tokens = int(_SETTLED_SHARE * self._protected_tokens)
        self._clock = 0  # tokens that have entered the protected segment
        self._positions: dict[NodeStats, int] = {}

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (position on the clock of protected tokens, last access)."""
        return (self._positions[node], node.last_access)

    def is_protected(self, node: NodeStats) -> bool:
        """Return whether the node is in the protected segment."""
        return self._positions[node] >= self._clock

    def on_insert(self, node: NodeStats) -> None:
        """Put a new node on probation; protect it if it is the upper half of a node that had a hit."""
        self._positions[node] = self._youngest_on_probation
        if node.hits:
            self._protect(node)

    def on_hit(self, node: NodeStats) -> None:
        """Protect the node until S further tokens are protected.

        A node in the newest quarter of the protected segment keeps its position.
        """
        newest = self._clock + self._protected_tokens - self._settled_tokens
        if self._positions[node] <= newest:
            self._protect(node)

    def on_evict(self, node: NodeStats) -> None:
        """Remove the node's position."""
        del self._positions[node]

    @property
    def _youngest_on_probation(self) -> int:
        return self._clock - 1

    def _protect(self, node: NodeStats) -> None:
        if node.tokens > self._protected_tokens:  # too large for the protected segment
            self._positions[node] = self._youngest_on_probation
            return
        self._positions[node] = self._clock + self._protected_tokens
        self._clock += node.tokens
