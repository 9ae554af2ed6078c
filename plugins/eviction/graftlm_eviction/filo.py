"""First in, last out: the leaf that was inserted latest goes first, so that the oldest stay."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["FILO"]


class FILO(EvictionStrategy):
    """Orders leaves by their creation, the latest first.

    Keeps what came first, such as system prompts that a warm-up has sent; turns over nothing else.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (-creation)."""
        return (-node.created,)
