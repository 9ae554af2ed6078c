"""First in, first out: the leaf that was inserted first is evicted first, regardless of hits."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["FIFO"]


class FIFO(EvictionStrategy):
    """Orders leaves by their creation time.

    Both halves of a split node keep its creation time.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (creation time,)."""
        return (node.created,)
