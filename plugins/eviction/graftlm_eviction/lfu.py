"""Least frequently used: the leaf that the fewest requests found goes first."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["LFU"]


class LFU(EvictionStrategy):
    """Orders leaves by how many matches ran through them; of equals, by their latest access.

    Counts never age: what was popular once stays until everything left is more popular.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (hits, last access)."""
        return (node.hits, node.last_access)
