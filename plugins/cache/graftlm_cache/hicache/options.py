"""The options of the hierarchical cache."""

from collections.abc import Iterator
from typing import Any, Literal, Self

import psutil
from pydantic import Field, model_validator

from graftlm.contracts import Options

__all__ = ["HicacheOptions", "StorageOptions"]


class StorageOptions(Options):
    """Which storage keeps blocks beyond the engine's life, and how long requests wait for it."""

    name: str = Field(description="A KV storage, such as `file`.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of that storage.")
    prefetch: Literal["best_effort", "wait_complete", "timeout"] = Field(
        default="timeout",
        description=(
            "How long a waiting request waits for its blocks from storage: `best_effort` not at all, it uses what has "
            "arrived when its turn comes; `wait_complete` until all have arrived; `timeout` until then, but no longer "
            "than `prefetch_timeout_s`."
        ),
    )
    prefetch_timeout_s: float = Field(default=1.0, gt=0, description="Seconds, for `timeout`.")


class HicacheOptions(Options):
    """Sizes and policies of the tiers below the device's memory."""

    host_tokens: int | None = Field(
        default=None, gt=0, description="Tokens that fit into host memory; null: set by `host_gib`."
    )
    host_gib: float = Field(
        default=4.0, gt=0, allow_inf_nan=False, description="GiB of host memory, when `host_tokens` is null."
    )
    block_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens of a block, the unit of the lower tiers; a multiple of the page size. Null: 64, or a page.",
    )
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        default="write_through",
        description=(
            "When blocks are copied to host memory, and from there to storage: `write_through` as soon as they are "
            "computed; `write_through_selective` once `min_uses` requests have used them; `write_back` when they are "
            "evicted from the device."
        ),
    )
    min_uses: int = Field(default=2, ge=1, description="Requests, for `write_through_selective`.")
    storage: StorageOptions | None = Field(default=None, description="A third tier; null: none.")

    def machine_obstacles(self) -> Iterator[tuple[str, str]]:
        """Say whether this machine has less memory than `host_gib`."""
        total_bytes = psutil.virtual_memory().total
        if self.host_tokens is None and self.host_gib * 2**30 > total_bytes:
            yield "host_gib", f"is {self.host_gib:g}, but this machine has {total_bytes / 2**30:.2f} GiB of memory"

    @model_validator(mode="after")
    def _check_min_uses(self) -> Self:
        if "min_uses" in self.model_fields_set and self.write_policy != "write_through_selective":
            raise ValueError("min_uses applies to write_policy write_through_selective only")
        return self
