"""Request priority: leaves that were used only by requests of low priority are evicted first."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["RequestPriority"]


class RequestPriority(EvictionStrategy):
    """Orders leaves by the highest priority of the requests that used them; among equals, by their last access.

    This is the priority that the scheduler uses, from `SamplingParams` or the request's body. Leaves of higher priority
    are evicted later.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (priority, last access)."""
        return (node.priority, node.last_access)
