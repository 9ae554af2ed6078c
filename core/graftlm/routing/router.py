"""Calls a routing policy for each request, and counts the requests of each replica."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from graftlm.contracts import ReplicaStates, RoutingPolicy
from graftlm.routing.block_digests import BlockDigests
from graftlm.types import TokenIds

__all__ = ["Route", "Router"]

logger = logging.getLogger(__name__)


class Route:
    """A request on its way to a replica, a `RoutedRequest`. `Router.route` creates it.

    Attributes:
        token_ids: the prompt, int32 [n].
        namespace: namespace of the request.
        key: the client's name for requests that belong together; None without a name.
        replica: number of the replica to which the request was sent; None before.
    """

    __slots__ = ("_blocks", "_digests", "_is_queued", "key", "namespace", "replica", "token_ids")

    def __init__(self, token_ids: TokenIds, namespace: str, key: str | None, blocks: BlockDigests | None) -> None:
        self.token_ids = token_ids
        self.namespace = namespace
        self.key = key
        self.replica: int | None = None
        self._blocks = blocks
        self._digests: Sequence[int] | None = None
        self._is_queued = False

    @property
    def digests(self) -> Sequence[int]:
        """Digests of the prompt's whole blocks; empty if the policy reads no digests. Computed when first read."""
        if self._digests is None:
            self._digests = () if self._blocks is None else self._blocks.of_prompt(self.token_ids, self.namespace)
        return self._digests


class Router:
    """Chooses a replica for each request, and keeps the states of the replicas.

    An error of the policy fails no request: it is logged, and the least loaded replica is chosen.

    Args:
        num_replicas: number of replicas; none is ready at first.
        policy: the policy; None: the least loaded replica is chosen.
        clock: a monotonic clock, in seconds.

    Attributes:
        states: the states of the replicas. The owner of the router sets `ready`.
    """

    def __init__(
        self, num_replicas: int, policy: RoutingPolicy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.states = ReplicaStates.idle(num_replicas)
        self._policy = policy
        self._clock = clock
        tokens = None if policy is None else policy.block_tokens
        self._blocks = None if tokens is None else BlockDigests(tokens)
        self._failed: set[str] = set()

    @property
    def event_block_tokens(self) -> int | None:
        """Number of tokens in a block, if the policy needs cache events; else None."""
        return self._policy.block_tokens if self._policy is not None and self._policy.uses_cache_events else None

    def route(self, token_ids: TokenIds, namespace: str = "", key: str | None = None) -> Route:
        """Return a new request for `choose`."""
        return Route(token_ids, namespace, key, self._blocks)

    def choose(self, route: Route) -> int | None:
        """Return the number of the replica for a request; None if no replica is ready."""
        if not np.count_nonzero(self.states.ready):
            return None
        if self._policy is None:
            return self.states.least_loaded()
        chosen = self._call("choose", route, self.states, self._clock())
        if isinstance(chosen, int | np.integer) and 0 <= chosen < len(self.states.ready) and self.states.ready[chosen]:
            return int(chosen)
        if "choose" not in self._failed:
            self._failed.add("choose")
            logger.error(
                "the routing policy %s chose replica %r, which is not ready; the least loaded replica is used",
                type(self._policy).__name__,
                chosen,
            )
        return self.states.least_loaded()

    def sent(self, route: Route, replica: int) -> None:
        """Count a request that is sent to a replica."""
        route.replica, route._is_queued = replica, True
        self.states.num_requests[replica] += 1
        self.states.queued_tokens[replica] += len(route.token_ids)
        self._call("sent", route, replica)

    def started(self, route: Route) -> None:
        """Record the first token of a request. The request no longer counts as queued."""
        assert route.replica is not None, "a request starts after it was sent"
        if route._is_queued:
            route._is_queued = False
            self.states.queued_tokens[route.replica] -= len(route.token_ids)
            self._call("started", route, route.replica)

    def ended(self, route: Route, num_output_tokens: int) -> None:
        """Record the end of a request, for any reason."""
        assert route.replica is not None, "a request ends after it was sent"
        self.states.num_requests[route.replica] -= 1
        if route._is_queued:
            route._is_queued = False
            self.states.queued_tokens[route.replica] -= len(route.token_ids)
        self._call("ended", route, route.replica, num_output_tokens)

    def report(self, replica: int, changes: Iterable[tuple[str, Sequence[int]]] = ()) -> None:
        """Record a message of a replica, with changes of its cache in their order.

        Args:
            changes: pairs of a kind ("stored", "removed" or "cleared") and digests; see `BlockChange`.
        """
        self.states.reported_s[replica] = self._clock()
        for kind, digests in changes:
            if kind == "cleared":
                self._call("cleared", replica)
            elif kind in ("stored", "removed"):
                self._call(kind, replica, digests)

    def clear(self, replica: int) -> None:
        """Record that a replica's cache is empty or unknown, for example because its process has died."""
        self._call("cleared", replica)

    def _call(self, name: str, *arguments: object) -> Any:
        """Call a method of the policy; return None if it raises."""
        if self._policy is None:
            return None
        try:
            return getattr(self._policy, name)(*arguments)
        except Exception:  # a policy's error must not fail requests
            if name not in self._failed:
                self._failed.add(name)
                logger.exception(
                    "%s.%s failed; further errors of this method are not logged", type(self._policy).__name__, name
                )
            return None
