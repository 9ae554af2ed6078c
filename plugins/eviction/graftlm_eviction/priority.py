"""The leaf that only unimportant requests used goes first."""

from graftlm.contracts import EvictionStrategy, NodeStats

__all__ = ["RequestPriority"]


class RequestPriority(EvictionStrategy):
    """Orders leaves by the highest priority of the requests that used them; of equals, by their latest access.

    The same number that `SamplingParams` or a request's body gives to the scheduler; higher is kept longer.
    """

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (priority, last access)."""
        return (node.priority, node.last_access)
