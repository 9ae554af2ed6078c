"""The eviction strategy `costly-last`: LRU with a grace period in proportion to a leaf's prefill cost."""

from pydantic import Field

from graftlm.contracts import EvictionStrategy, NodeStats, Options

__all__ = ["CostlyLast", "CostlyLastOptions"]


class CostlyLastOptions(Options):
    """The options of `costly-last`, in YAML under `cache.eviction.options`."""

    grace_s_per_1000_tokens: float = Field(
        default=10.0,
        ge=0,
        le=1e6,
        description="Seconds by which 1,000 tokens without context stay cached longer than by least recently used. 0: "
        "the same order as `lru`.",
    )


class CostlyLast(EvictionStrategy):
    """A strategy that evicts the leaf whose grace period ends first. It has no state: the node's stats are enough."""

    def __init__(self, options: CostlyLastOptions) -> None:
        self._grace_s_per_token = options.grace_s_per_1000_tokens / 1000

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return the end of the grace period (last access + grace), in seconds."""
        return (node.last_access + self._grace_s_per_token * node.prefill_cost,)
