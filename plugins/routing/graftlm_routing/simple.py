"""The policies that look at loads only: `random`, `round_robin`, `power_of_two` and `shortest_queue`."""

import random

import numpy as np

from graftlm.contracts import ReplicaStates, RoutedRequest, RoutingPolicy

__all__ = ["PowerOfTwo", "RandomChoice", "RoundRobin", "ShortestQueue"]


class RandomChoice(RoutingPolicy):
    """Chooses each ready replica with the same probability."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return a random ready replica."""
        ready = np.flatnonzero(replicas.ready)
        return int(ready[self._random.randrange(len(ready))])


class RoundRobin(RoutingPolicy):
    """Chooses the ready replicas in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return the next ready replica after the previous choice."""
        ready = np.flatnonzero(replicas.ready)
        self._last = int(ready[np.searchsorted(ready, self._last, side="right") % len(ready)])
        return self._last


class PowerOfTwo(RoutingPolicy):
    """Chooses the less loaded of two random replicas (Mitzenmacher, "The power of two choices", 2001)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return the one of two random ready replicas that has fewer requests, then fewer queued tokens."""
        ready = np.flatnonzero(replicas.ready)
        if len(ready) == 1:
            return int(ready[0])
        pair = [int(ready[place]) for place in self._random.sample(range(len(ready)), 2)]
        return min(pair, key=lambda replica: (replicas.num_requests[replica], replicas.queued_tokens[replica]))


class ShortestQueue(RoutingPolicy):
    """Chooses the replica with the fewest queued prompt tokens, then the fewest requests."""

    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return the least loaded ready replica."""
        return replicas.least_loaded()
