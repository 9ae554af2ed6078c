"""The eviction strategy, which is LRU with a grace period for each hit."""

from graftlm.contracts import EvictionStrategy, NodeStats, Options
from pydantic import Field

__all__ = ["RecentAndUsed", "RecentAndUsedOptions"]


class RecentAndUsedOptions(Options):
    """The entries of `cache.eviction.options` in a configuration."""

    grace_s_per_hit: float = Field(
        default=60.0,
        ge=0,
        le=1e6,
        description="Seconds by which a hit extends the life of a prefix. 0: the same order as `lru`.",
    )


class RecentAndUsed(EvictionStrategy):
    """A strategy that orders leaves by last access plus a grace period for each hit. It has no state."""

    def __init__(self, options: RecentAndUsedOptions) -> None:
        self._grace_s_per_hit = options.grace_s_per_hit

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access + grace period), in seconds. The node with the lowest value is evicted first."""
        return (node.last_access + self._grace_s_per_hit * node.hits,)
