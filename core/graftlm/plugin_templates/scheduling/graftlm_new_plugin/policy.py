"""The scheduling policy: shortest job first, by the number of tokens that remain to be computed."""

from collections.abc import Sequence

from graftlm.contracts import Options, SchedulingPolicy, WaitingRequest
from pydantic import Field

__all__ = ["ShortestFirst", "ShortestFirstOptions"]


class ShortestFirstOptions(Options):
    """The entries of `scheduling.policy.options` in a configuration."""

    max_wait_s: float = Field(
        default=30.0,
        gt=0,
        description="Maximum time in seconds for which a waiting request may be passed over. After this time it is "
        "admitted first.",
    )


class ShortestFirst(SchedulingPolicy):
    """A policy that orders requests by work: uncached prompt tokens, plus the maximum number of output tokens."""

    def __init__(self, options: ShortestFirstOptions) -> None:
        self.max_wait_s = options.max_wait_s  # the core admits requests first that were passed over for longer

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests by work, and in order of arrival for equal work (sorting is stable)."""
        return sorted(waiting, key=_work)


def _work(request: WaitingRequest) -> int:
    return request.num_tokens - request.cached_tokens + request.max_new_tokens
