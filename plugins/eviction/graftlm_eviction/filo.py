"""First in, last out: the leaf that was inserted last is evicted first, so that the oldest leaves stay."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["FILO"]


class FILO(EvictionStrategy):
    """Orders leaves by their creation time, latest first.

    It keeps the first prompts, such as system prompts sent during a warm-up. The other prompts replace each other.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (-creation time,)."""
        return (-node.created,)
