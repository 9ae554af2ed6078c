"""The options of the processor, as set in a request."""

from graftlm import Options
from pydantic import Field

__all__ = ["RecentPenaltyOptions"]


class RecentPenaltyOptions(Options):
    """The value of `new-plugin` in a request's `logits_processors`."""

    penalty: float = Field(default=1.0, ge=0, description="Number that is subtracted from the logits of recent tokens.")
    window_tokens: int = Field(default=64, ge=1, description="Number of latest tokens that count as recent.")
