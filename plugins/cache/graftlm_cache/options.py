"""The options of the cache `radix`."""

from pydantic import Field

from graftlm.contracts import Options

__all__ = ["RadixOptions"]


class RadixOptions(Options):
    """States of models with recurrent layers. Other models do not use these options."""

    state_interval_tokens: int | None = Field(
        default=1024,
        gt=0,
        description="Maximum distance in tokens between the recurrent states that are stored within a prompt, rounded "
        "up to whole pages. States are also stored at the last page end of each prompt, and where a prompt leaves the "
        "cached prefixes. Null: only there.",
    )
