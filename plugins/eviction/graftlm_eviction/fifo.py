"""First in, first out: the leaf that was inserted longest ago goes first, whatever was found since."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["FIFO"]


class FIFO(EvictionStrategy):
    """Orders leaves by their creation.

    Both halves of a split keep the creation of the whole.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (creation)."""
        return (node.created,)
