"""Options of the policies."""

from pydantic import Field, field_validator

from graftlm.contracts import Options

__all__ = ["ApproximateTreeOptions", "CacheAwareOptions", "ConsistentHashOptions"]


def _check_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


class ConsistentHashOptions(Options):
    """Options of `consistent_hash`."""

    prefix_tokens: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Number of tokens at the start of a prompt that determine its replica, if the request has no key. "
        "A power of two.",
    )
    load_factor: float | None = Field(
        default=1.25,
        gt=1,
        description="A replica gets a request only while it has fewer requests than this factor times the mean, "
        "rounded up. Null: no limit.",
    )

    _power_of_two = field_validator("prefix_tokens")(_check_power_of_two)


class ApproximateTreeOptions(Options):
    """Options of `approximate_tree`."""

    block_tokens: int = Field(
        default=64, ge=1, le=65536, description="Number of tokens in a block of the tree. A power of two."
    )
    cache_threshold: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the prompt that must match for the replica of the match to be chosen. Below it, the "
        "replica with the fewest blocks in the tree is chosen.",
    )
    balance_abs_threshold: int = Field(
        default=32,
        ge=0,
        description="The replica with the fewest requests is chosen if the highest and the lowest number of requests "
        "differ by more than this number, and `balance_rel_threshold` is exceeded too.",
    )
    balance_rel_threshold: float = Field(
        default=1.1, ge=1, description="Ratio of the highest number of requests to the lowest, for the same rule."
    )
    max_blocks: int = Field(
        default=262_144,
        ge=1,
        description="Maximum number of blocks in the tree for each replica; the least recently used are removed.",
    )

    _power_of_two = field_validator("block_tokens")(_check_power_of_two)


class CacheAwareOptions(Options):
    """Options of `cache_aware`."""

    block_tokens: int = Field(
        default=64,
        ge=1,
        le=65536,
        description="Number of tokens in a block of the index. A power of two. Cached prefixes are compared in whole "
        "blocks, and a block has at least one page.",
    )
    uncached_weight: float = Field(
        default=16.0,
        ge=1,
        description="Cost of an uncached token of the request, in tokens that wait before it. With 1, only the "
        "request's own time to first token counts; larger numbers favour hits.",
    )
    balance_weight: float = Field(
        default=1.0,
        ge=0,
        description="Cost of a replica with the mean work, in requests with the mean number of uncached and output "
        "tokens. Larger numbers favour an even distribution of work.",
    )
    imbalance: float = Field(
        default=0.2,
        ge=0,
        description="Bound on imbalance: a replica gets a request only while its recent work is at most 1 + this "
        "number times the mean of the ready replicas, plus `slack_requests`.",
    )
    slack_requests: float = Field(
        default=8.0,
        ge=0,
        description="Difference in work that is not significant, in requests with the mean number of uncached and "
        "output tokens. Each replica may have this work in addition to the bound.",
    )
    window_s: float = Field(
        default=1800.0,
        gt=0,
        description="Time in seconds after which work counts half in the bound on imbalance.",
    )
    max_staleness_s: float = Field(
        default=5.0,
        gt=0,
        description="Bound on staleness: the cached blocks of a replica that has requests are ignored if its latest "
        "message is older than this number of seconds.",
    )
    max_blocks: int = Field(
        default=4_194_304,
        ge=1,
        description="Maximum number of distinct blocks in the index, of about 200 bytes each. Blocks beyond it are "
        "not indexed.",
    )

    _power_of_two = field_validator("block_tokens")(_check_power_of_two)
