"""Most recently used: the leaf whose last match or insert is most recent is evicted first."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["MRU"]


class MRU(EvictionStrategy):
    """Orders leaves by their last access, most recent first.

    This is the best order for a loop over more prompts than fit; LRU has no hits in such a loop.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (-last access,)."""
        return (-node.last_access,)
