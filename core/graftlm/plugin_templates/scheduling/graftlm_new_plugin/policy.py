"""The policy: shortest job first, by the tokens that are left to compute."""

from collections.abc import Sequence

from graftlm.contracts import Options, SchedulingPolicy, WaitingRequest
from pydantic import Field

__all__ = ["ShortestFirst", "ShortestFirstOptions"]


class ShortestFirstOptions(Options):
    """What a configuration may give under `scheduling.policy.options`."""

    max_wait_s: float = Field(
        default=30.0, gt=0, description="Seconds that a request may be passed over before it goes first."
    )


class ShortestFirst(SchedulingPolicy):
    """Orders by work: tokens of the prompt that are not cached, and tokens that may be generated."""

    def __init__(self, options: ShortestFirstOptions) -> None:
        self.max_wait_s = options.max_wait_s  # the core ages requests by it, so that no long one waits for ever

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests by work; equal ones in order of arrival, for sorting keeps the order of equals."""
        return sorted(waiting, key=_work)


def _work(request: WaitingRequest) -> int:
    return request.num_tokens - request.cached_tokens + request.max_new_tokens
