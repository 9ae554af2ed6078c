"""Options of the policies."""

from pydantic import Field

from graftlm.contracts import Options

__all__ = ["PreemptivePriorityOptions", "RandomOrderOptions", "ReorderingOptions"]


class ReorderingOptions(Options):
    """Options of every policy that can admit later arrivals before earlier ones."""

    max_wait_s: float = Field(
        default=60.0,
        gt=0,
        description="Maximum time in seconds for which a waiting request may be passed over. After this time it is "
        "admitted first.",
    )


class RandomOrderOptions(ReorderingOptions):
    """Options of `random`."""

    seed: int | None = Field(default=None, description="Seed of the random orders. Null: the engine's seed.")


class PreemptivePriorityOptions(Options):
    """Options of `priority`."""

    preempt: bool = Field(
        default=True,
        description="Retract running requests of lower priority if no row or too few pages are free for a waiting "
        "request.",
    )
    min_difference: int = Field(
        default=1,
        ge=1,
        description="Minimum difference between the priorities of a waiting request and of a running one that it "
        "replaces.",
    )
