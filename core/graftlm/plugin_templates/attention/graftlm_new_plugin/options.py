"""The options of the backend, as set in a configuration."""

from graftlm import Options
from pydantic import Field

__all__ = ["GatherOptions"]


class GatherOptions(Options):
    """The entries of `attention.options`."""

    queries_at_once: int = Field(
        default=256,
        ge=1,
        description="Number of query tokens whose scores are computed together. A smaller number needs less memory.",
    )
