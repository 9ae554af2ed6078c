"""The contract of a scheduling policy: in which order waiting requests are considered for admission."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Preemption", "PrefixGroup", "SchedulingContext", "SchedulingPolicy", "WaitingRequest"]


class PrefixGroup(Protocol):
    """Several waiting requests whose tokens begin alike: an inner node of the radix tree of what waits.

        parent         num_tokens 100, num_waiting 5
        ├─ group       num_tokens 180, num_waiting 3: the first 100 of them are the parent's
        └─ (2 requests that share no more than the parent's 100 tokens)

    Groups compare and hash by identity, and may change as soon as `order` has returned.
    """

    @property
    def parent(self) -> "PrefixGroup | None":
        """The next larger group, which shares fewer tokens, if there is one."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that all of them begin with, in whole pages; at least one page."""
        ...

    @property
    def num_waiting(self) -> int:
        """How many wait, at least two; those of the smaller groups inside it included."""
        ...


class WaitingRequest(Protocol):
    """What a policy may know of a waiting request."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        ...

    @property
    def arrival_s(self) -> float:
        """Clock reading when it arrived."""
        ...

    @property
    def priority(self) -> int:
        """Higher is more important."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens it must have in the cache before it samples: its prompt, and its output so far if it was retracted."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens it may still generate."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Tokens of it that the prefix cache holds now. Looked up when asked for, and remembered."""
        ...

    @property
    def group(self) -> PrefixGroup | None:
        """The smallest group it is in, cached or not; None when nobody else waits who begins like it."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulingContext:
    """What a policy is created with.

    Attributes:
        seed: for policies that draw.
    """

    seed: int = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """When a waiting request may take the place of a running one.

    Attributes:
        min_difference: by how much its priority must be higher; at least 1.
    """

    min_difference: int = 1


class SchedulingPolicy(ABC):
    """Orders the waiting requests.

    Core sorts by request priority first, and bounds waiting for every policy: a request that later arrivals have been
    admitted in front of for `max_wait_s` goes first (ageing). Core does the preempting as well; a policy only says
    whether and when.

    Invariants, each checked by `graftlm.testing.SchedulingPolicyConformance`:
        - `order` returns a permutation of what it was given, as a new list, and changes nothing.
        - `order` is deterministic for equal input, clock reading and seed.
    """

    #: Seconds a request may be passed over before it goes first; None for policies that never reorder.
    max_wait_s: float | None = None

    #: When a waiting request that lacks a row or pages sends less important ones back to the queue; None for never.
    preemption: Preemption | None = None

    @abstractmethod
    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests, first to admit first. `waiting` comes in order of arrival; `now` is in clock seconds."""
