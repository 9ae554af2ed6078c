"""The contract of a scheduling policy: in which order waiting requests are considered for admission."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["SchedulingContext", "SchedulingPolicy", "WaitingRequest"]


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


@dataclass(frozen=True, slots=True)
class SchedulingContext:
    """What a policy is created with.

    Attributes:
        seed: for policies that draw.
    """

    seed: int = 0


class SchedulingPolicy(ABC):
    """Orders the waiting requests.

    Core sorts by request priority first, and bounds waiting for every policy: a request that later arrivals have been
    admitted in front of for `max_wait_s` goes first (ageing).

    Invariants, each checked by `graftlm.testing.SchedulingPolicyConformance`:
        - `order` returns a permutation of what it was given, as a new list, and changes nothing.
        - `order` is deterministic for equal input, clock reading and seed.
    """

    #: Seconds a request may be passed over before it goes first; None for policies that never reorder.
    max_wait_s: float | None = None

    @abstractmethod
    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests, first to admit first. `waiting` comes in order of arrival; `now` is in clock seconds."""
