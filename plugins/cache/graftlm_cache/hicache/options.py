"""The options of the hierarchical cache."""

from collections.abc import Iterator
from typing import Any, Literal, Self

import psutil
from pydantic import Field, model_validator

from graftlm.contracts import Options

__all__ = ["HicacheOptions", "StorageOptions"]


class StorageOptions(Options):
    """The storage tier, and the time that requests wait for it."""

    name: str = Field(description="Name of a KV storage, such as `file`.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of that storage.")
    prefetch: Literal["best_effort", "wait_complete", "timeout"] = Field(
        default="timeout",
        description=(
            "How long a waiting request waits for its blocks from storage. `best_effort`: it does not wait, and uses "
            "the blocks that are in host memory when it is admitted. `wait_complete`: until all blocks are loaded. "
            "`timeout`: until all are loaded, but at most `prefetch_timeout_s`."
        ),
    )
    prefetch_timeout_s: float = Field(
        default=1.0, gt=0, description="Maximum waiting time in seconds, for `prefetch: timeout`."
    )


class HicacheOptions(Options):
    """Sizes and policies of the tiers below the device's memory."""

    host_tokens: int | None = Field(
        default=None, gt=0, description="Size of the host tier in tokens. Null: `host_gib` sets the size."
    )
    host_gib: float = Field(
        default=4.0, gt=0, allow_inf_nan=False, description="Size of the host tier in GiB, if `host_tokens` is null."
    )
    block_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Number of tokens in a block, the unit of the lower tiers; a multiple of the page size. Null: "
        "the smallest multiple of the page size that is at least 64.",
    )
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        default="write_through",
        description=(
            "When blocks are copied to host memory, and from there to storage. `write_through`: as soon as they are "
            "computed. `write_through_selective`: after `min_uses` requests have used them. `write_back`: when they "
            "are evicted from the device."
        ),
    )
    min_uses: int = Field(
        default=2, ge=1, description="Number of requests that must use a block, for `write_through_selective`."
    )
    storage: StorageOptions | None = Field(default=None, description="The storage tier. Null: no storage.")

    def machine_obstacles(self) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) if this machine has less memory than `host_gib`."""
        total_bytes = psutil.virtual_memory().total
        if self.host_tokens is None and self.host_gib * 2**30 > total_bytes:
            yield "host_gib", f"is {self.host_gib:g}, but this machine has {total_bytes / 2**30:.2f} GiB of memory"

    @model_validator(mode="after")
    def _check_min_uses(self) -> Self:
        if "min_uses" in self.model_fields_set and self.write_policy != "write_through_selective":
            raise ValueError("min_uses applies to write_policy write_through_selective only")
        return self
