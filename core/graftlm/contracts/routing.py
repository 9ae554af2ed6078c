"""The contract of a routing policy, which chooses the replica of each request.

A router calls a policy in one thread. These are the calls for one request, in their order:

    choose ──> sent ──> started ──> ended        started: the request has its first token, so its prompt is computed
                  └──────────────────> ended     the request ended without a token

A block is `block_tokens` consecutive tokens of a prompt, starting at a multiple of `block_tokens`. The digest of a
block is a 64-bit number that depends on the namespace and on all tokens up to the end of the block. Equal digests mean
equal prefixes, except for collisions, which are rare enough for a choice that affects only speed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from graftlm.types import TokenIds

__all__ = ["ReplicaStates", "RoutedRequest", "RoutingContext", "RoutingPolicy"]


class RoutedRequest(Protocol):
    """The properties of a request that a policy may read. Requests are compared and hashed by identity."""

    @property
    def token_ids(self) -> TokenIds:
        """The prompt, int32 [n]; a policy does not change it."""
        ...

    @property
    def namespace(self) -> str:
        """Namespace of the request; requests of different namespaces share no cached prefix."""
        ...

    @property
    def key(self) -> str | None:
        """The client's name for requests that belong together, such as a conversation; None if it gave no name."""
        ...

    @property
    def digests(self) -> Sequence[int]:
        """Digests of the prompt's whole blocks, in order; empty if the policy's `block_tokens` is None.

        They are computed when this is first read.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaStates:
    """The states of all replicas, in arrays with one element for each replica. The router writes them.

    Attributes:
        ready: bool [replicas], whether the replica accepts requests.
        num_requests: int64 [replicas], number of the replica's requests that have not ended.
        queued_tokens: int64 [replicas], number of prompt tokens of the replica's requests without a first token.
        reported_s: float64 [replicas], clock reading at the latest message of the replica, in seconds; -inf if there
            was none.
    """

    ready: NDArray[np.bool_]
    num_requests: NDArray[np.int64]
    queued_tokens: NDArray[np.int64]
    reported_s: NDArray[np.float64]

    @classmethod
    def idle(cls, num_replicas: int, *, ready: bool = False) -> Self:
        """Return the states of replicas without requests."""
        return cls(
            np.full(num_replicas, ready),
            np.zeros(num_replicas, dtype=np.int64),
            np.zeros(num_replicas, dtype=np.int64),
            np.full(num_replicas, -np.inf),
        )

    def least_loaded(self) -> int:
        """Return the ready replica with the fewest queued tokens; of several, the one with the fewest requests.

        At least one replica must be ready.
        """
        ready = np.flatnonzero(self.ready)
        queued = self.queued_tokens[ready]
        ready = ready[queued == queued.min()]
        return int(ready[self.num_requests[ready].argmin()])


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """The arguments of a policy's `create`.

    Attributes:
        num_replicas: number of replicas, ready or not. Replicas are numbered from 0.
        page_size: number of tokens in a page of the replicas' caches, a power of two.
        seed: seed for policies that use random numbers.
    """

    num_replicas: int
    page_size: int = 1
    seed: int = 0


class RoutingPolicy(ABC):
    """Chooses the replica of each request.

    Invariants, each checked by `graftlm.testing.RoutingPolicyConformance`:
        - `choose` returns the number of a ready replica, for any prompt and any states with at least one ready replica.
        - `choose` does not change the states or the prompt.
        - The policy is deterministic: equal contexts and equal calls give equal choices.
        - Each method accepts a replica that is not ready, because a replica may fail between two calls.
        - `removed` ignores digests that the replica does not hold, and `cleared` a replica that holds nothing.
        - After `cleared`, the choice does not depend on what the replica held.
        - `block_tokens` is None or a power of two. A policy that `uses_cache_events` has blocks of whole pages.
    """

    #: Number of tokens in a block, a power of two; None if the policy reads no digests.
    block_tokens: int | None = None

    #: Whether the policy needs `stored`, `removed` and `cleared`, which need cache events from every replica.
    uses_cache_events: bool = False

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return the number of the replica for a request. At least one replica is ready.

        Args:
            request: the request.
            replicas: the states of all replicas.
            now_s: clock reading in seconds, on the clock of `ReplicaStates.reported_s`.
        """

    def sent(self, request: RoutedRequest, replica: int) -> None:
        """Handle a request that was sent to a replica, which may be another one than `choose` returned."""

    def started(self, request: RoutedRequest, replica: int) -> None:
        """Handle the first token of a request."""

    def ended(self, request: RoutedRequest, replica: int, num_output_tokens: int) -> None:
        """Handle the end of a request for any reason."""

    def stored(self, replica: int, digests: Sequence[int]) -> None:
        """Handle blocks that a replica's prefix cache holds from now on."""

    def removed(self, replica: int, digests: Sequence[int]) -> None:
        """Handle blocks that a replica's prefix cache does not hold any more."""

    def cleared(self, replica: int) -> None:
        """Handle the loss of all blocks of a replica: a flush, the end of its process, or missing events."""
