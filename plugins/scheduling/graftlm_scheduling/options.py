"""Options of the policies."""

from pydantic import Field

from graftlm.contracts import Options

__all__ = ["PreemptivePriorityOptions", "RandomOrderOptions", "ReorderingOptions"]


class ReorderingOptions(Options):
    """Options of every policy that lets later arrivals go first."""

    max_wait_s: float = Field(
        default=60.0, gt=0, description="Seconds a request may be passed over before it goes first."
    )


class RandomOrderOptions(ReorderingOptions):
    """Options of `random`."""

    seed: int | None = Field(default=None, description="What the orders are drawn from; null takes the engine's.")


class PreemptivePriorityOptions(Options):
    """Options of `priority`."""

    preempt: bool = Field(
        default=True,
        description="Send less important running requests back to the queue when a waiting one lacks a row or pages.",
    )
    min_difference: int = Field(
        default=1, ge=1, description="By how much a request's priority must be higher than that of one that makes way."
    )
