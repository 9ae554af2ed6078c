"""The strategy: least recently used, with a grace for each hit."""

from graftlm.contracts import EvictionStrategy, NodeStats, Options
from pydantic import Field

__all__ = ["RecentAndUsed", "RecentAndUsedOptions"]


class RecentAndUsedOptions(Options):
    """What a configuration may give under `cache.eviction.options`."""

    grace_s_per_hit: float = Field(
        default=60.0, ge=0, le=1e6, description="Seconds that a hit adds to a prefix's life. 0 is least recently used."
    )


class RecentAndUsed(EvictionStrategy):
    """Orders leaves by the moment their grace ends; all it asks stands in the node's stats, so it keeps no state."""

    def __init__(self, options: RecentAndUsedOptions) -> None:
        self._grace_s_per_hit = options.grace_s_per_hit

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access + grace), in seconds; the lowest goes first."""
        return (node.last_access + self._grace_s_per_hit * node.hits,)
