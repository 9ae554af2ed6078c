"""Least recently used: the leaf whose last match or insert is oldest is evicted first."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["LRU"]


class LRU(EvictionStrategy):
    """Orders leaves by their last access."""

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access,)."""
        return (node.last_access,)
