"""Most recently used: the leaf whose latest match or insert is the most recent goes first."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["MRU"]


class MRU(EvictionStrategy):
    """Orders leaves by their latest access, the latest first.

    The best order for a loop over more prompts than fit, where LRU finds nothing at all.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (-last access)."""
        return (-node.last_access,)
