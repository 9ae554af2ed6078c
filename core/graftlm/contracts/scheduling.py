"""The contract of a scheduling policy, which orders waiting requests for admission."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Preemption", "PrefixGroup", "SchedulingContext", "SchedulingPolicy", "WaitingRequest"]


class PrefixGroup(Protocol):
    """Two or more waiting requests with a common prefix: a node in the radix tree of the waiting requests.

        parent         num_tokens 100, num_waiting 5
        ├─ group       num_tokens 180, num_waiting 3: its first 100 tokens are the parent's
        └─ (2 requests that share only the parent's 100 tokens)

    Groups are compared and hashed by identity. A group may change after `order` has returned.
    """

    @property
    def parent(self) -> "PrefixGroup | None":
        """The next larger group, which has a shorter common prefix; None if there is no such group."""
        ...

    @property
    def num_tokens(self) -> int:
        """Length of the common prefix in tokens, a multiple of the page size; at least one page."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of requests in this group, including the smaller groups inside it; at least two."""
        ...


class WaitingRequest(Protocol):
    """The properties of a waiting request that a policy may read."""

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
        """Number of the request's tokens that the prefix cache has now. It is computed when first read, then stored."""
        ...

    @property
    def group(self) -> PrefixGroup | None:
        """The smallest group with this request, cached or not; None if no other waiting request shares a prefix."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulingContext:
    """The arguments of a policy's `create`.

    Attributes:
        seed: seed for policies that use random numbers.
    """

    seed: int = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """The condition under which a waiting request preempts a running request.

    Attributes:
        min_difference: minimum difference, at least 1, between the priority of the waiting request and the priority of
            a running request that is retracted for it.
    """

    min_difference: int = 1


class SchedulingPolicy(ABC):
    """Orders the waiting requests.

    Core first sorts by request priority, and uses the policy's order within a priority. Core also performs ageing: a
    request is admitted first if later requests have been admitted before it for `max_wait_s` seconds. Core performs
    preemption; a policy only sets its condition.

    Invariants, each checked by `graftlm.testing.SchedulingPolicyConformance`:
        - `order` returns a permutation of its input as a new list, and has no effects.
        - `order` is deterministic: equal input, clock reading and seed give the same order.
    """

    #: Seconds during which later requests may be admitted before a request; afterwards this request is admitted first.
    #: None for policies that do not change the order of arrival.
    max_wait_s: float | None = None

    #: Condition under which less important running requests are retracted for a waiting request that lacks a row or
    #: pages; None: they are not retracted.
    preemption: Preemption | None = None

    @abstractmethod
    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests in order of admission. `waiting` is in order of arrival; `now` is in clock seconds."""
