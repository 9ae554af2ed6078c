"""The contract of a scheduling policy: the order in which waiting requests are considered for admission."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Preemption", "PrefixGroup", "SchedulingContext", "SchedulingPolicy", "WaitingRequest"]


class PrefixGroup(Protocol):
    """Waiting requests with a common prefix: an inner node of the radix tree of the waiting requests.

        parent         num_tokens 100, num_waiting 5
        ├─ group       num_tokens 180, num_waiting 3: its first 100 tokens are the parent's
        └─ (2 requests that share only the parent's 100 tokens)

    Groups compare and hash by identity. They may change after `order` has returned.
    """

    @property
    def parent(self) -> "PrefixGroup | None":
        """The next larger group, which shares fewer tokens; None if there is none."""
        ...

    @property
    def num_tokens(self) -> int:
        """Length of the common prefix in tokens, a multiple of the page size; at least one page."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of requests in this group and in the smaller groups inside it; at least two."""
        ...


class WaitingRequest(Protocol):
    """A waiting request, as a policy may read it."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        ...

    @property
    def arrival_s(self) -> float:
        """Clock reading at the request's arrival, in seconds."""
        ...

    @property
    def priority(self) -> int:
        """Priority of the request; higher is more important."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens to prefill before sampling: the prompt, and after a retraction also the output so far."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens that the request may still generate."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Number of the request's tokens that the prefix cache has now. It is computed on first access, then stored."""
        ...

    @property
    def group(self) -> PrefixGroup | None:
        """The smallest group that contains the request, cached or not; None if no waiting request shares a prefix."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulingContext:
    """The arguments of a policy's `create`.

    Attributes:
        seed: seed of the random numbers of policies that draw some.
    """

    seed: int = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """The condition under which a waiting request preempts a running one.

    Attributes:
        min_difference: minimum difference of the two priorities; at least 1.
    """

    min_difference: int = 1


class SchedulingPolicy(ABC):
    """Orders the waiting requests.

    Core sorts by request priority first. Core also limits the waiting time (ageing): a request that later arrivals have
    overtaken for `max_wait_s` is admitted first. Core performs preemption; a policy only sets its condition.

    Invariants, each checked by `graftlm.testing.SchedulingPolicyConformance`:
        - `order` returns a permutation of its input as a new list, and changes nothing.
        - `order` is deterministic for equal input, clock reading and seed.
    """

    #: Seconds for which later arrivals may overtake a request before it is admitted first; None for policies that never
    #: reorder.
    max_wait_s: float | None = None

    #: Condition under which a waiting request without a free row or pages retracts less important requests; None:
    #: never.
    preemption: Preemption | None = None

    @abstractmethod
    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests in order of admission. `waiting` is in order of arrival; `now` is in clock seconds."""
