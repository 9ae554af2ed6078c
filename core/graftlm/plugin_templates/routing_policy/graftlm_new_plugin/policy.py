"""The routing policy: requests with the same key stay on one replica."""

from collections import OrderedDict

from graftlm.contracts import Options, ReplicaStates, RoutedRequest, RoutingPolicy
from pydantic import Field

__all__ = ["StickyKeys", "StickyKeysOptions"]

MAX_KEYS = 10_000


class StickyKeysOptions(Options):
    """The entries of `parallel.routing.options` in a configuration."""

    stay_below: int = Field(
        default=16, ge=1, description="A key stays on its replica while the replica has fewer requests than this."
    )


class StickyKeys(RoutingPolicy):
    """A policy that remembers the replica of each key, and uses the least loaded replica for new keys."""

    def __init__(self, options: StickyKeysOptions) -> None:
        self._stay_below = options.stay_below
        self._replica_of: OrderedDict[str, int] = OrderedDict()  # key -> replica, the most recent last

    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return the replica of the request's key, or else the least loaded one."""
        known = self._replica_of.get(request.key or "")
        if known is not None and replicas.ready[known] and replicas.num_requests[known] < self._stay_below:
            return known
        return replicas.least_loaded()

    def sent(self, request: RoutedRequest, replica: int) -> None:
        """Remember the replica of the key, and forget the oldest keys."""
        if request.key:
            self._replica_of[request.key] = replica
            self._replica_of.move_to_end(request.key)
            if len(self._replica_of) > MAX_KEYS:
                self._replica_of.popitem(last=False)
