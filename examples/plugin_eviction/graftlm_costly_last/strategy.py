"""The strategy: least recently used, with a grace in proportion to the cost of a leaf."""

from pydantic import Field

from graftlm.contracts import EvictionStrategy, NodeStats, Options

__all__ = ["CostlyLast", "CostlyLastOptions"]


class CostlyLastOptions(Options):
    """What a YAML file may give under `cache.eviction.options`."""

    grace_s_per_1000_tokens: float = Field(
        default=10.0,
        ge=0,
        le=1e6,
        description="Seconds by which 1,000 tokens without context outlive their last use. 0 is least recently used.",
    )


class CostlyLast(EvictionStrategy):
    """Orders leaves by the moment their grace ends; it needs no state, for all it asks is in the node's stats."""

    def __init__(self, options: CostlyLastOptions) -> None:
        self._grace_s_per_token = options.grace_s_per_1000_tokens / 1000

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access + grace), in seconds."""
        return (node.last_access + self._grace_s_per_token * node.prefill_cost,)
