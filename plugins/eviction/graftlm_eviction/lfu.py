"""Least frequently used: the leaf with the fewest hits is evicted first."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["LFU"]


class LFU(EvictionStrategy):
    """Orders leaves by the number of matches that included them; leaves with equal numbers, by their last access.

    Counts never decrease: a leaf that was once popular stays until all other leaves have more hits.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (hits, last access)."""
        return (node.hits, node.last_access)
