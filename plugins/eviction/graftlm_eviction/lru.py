"""Least recently used: the leaf whose latest match or insert is longest ago goes first."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["LRU"]


class LRU(EvictionStrategy):
    """Orders leaves by their latest access."""

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access)."""
        return (node.last_access,)
