"""What a configuration may give to the backend."""

from graftlm import Options
from pydantic import Field

__all__ = ["GatherOptions"]


class GatherOptions(Options):
    """What stands under `attention.options`."""

    queries_at_once: int = Field(
        default=256, ge=1, description="Query tokens whose scores are held at once; fewer take less memory."
    )
