"""The options of the backend, as set in a configuration."""

from graftlm import Options
from pydantic import Field

__all__ = ["GatherOptions"]


class GatherOptions(Options):
    """The entries of `attention.options`."""

    queries_at_once: int = Field(
        default=256, ge=1, description="Query tokens whose scores are held at once; fewer take less memory."
    )
