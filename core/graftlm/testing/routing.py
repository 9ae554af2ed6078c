"""The conformance kit for routing policies."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from graftlm.contracts import ReplicaStates, RoutedRequest, RoutingContext, RoutingPolicy
from graftlm.routing import BlockDigests
from graftlm.testing.conformance import Conformance
from graftlm.types import TokenIds

__all__ = ["FakeRoutedRequest", "RoutingPolicyConformance"]

_NO_TOKENS: TokenIds = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class FakeRoutedRequest:
    """A `RoutedRequest` with fixed values."""

    token_ids: TokenIds = field(default_factory=lambda: _NO_TOKENS)
    namespace: str = ""
    key: str | None = None
    digests: Sequence[int] = ()


class RoutingPolicyConformance(Conformance, ABC):
    """The kit for the contract `RoutingPolicy`.

        class TestMyPolicy(RoutingPolicyConformance):
            def create(self, context):
                return MyPolicy()

    Attributes:
        parameters: `num_replicas` is the number of replicas. `seed` is the seed of the random requests and of the
            policy.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"num_replicas": (1, 3, 70), "seed": (0, 1)}

    @abstractmethod
    def create(self, context: RoutingContext) -> RoutingPolicy:
        """Return a new policy."""

    def test_choose_returns_a_ready_replica(self, num_replicas: int, seed: int) -> None:
        """`choose` returns the number of a ready replica, for any prompt and any states."""
        fleet = self._fleet(num_replicas, seed)
        for _ in range(150):
            chosen = fleet.step()
            assert isinstance(chosen, int | np.integer), f"choose() returned {chosen!r}, expected a number"
            assert 0 <= chosen < num_replicas, f"choose() returned {chosen} of {num_replicas} replicas"
            assert fleet.states.ready[chosen], f"choose() returned {chosen}, which is not ready"

    def test_choose_changes_neither_states_nor_prompt(self, num_replicas: int, seed: int) -> None:
        """`choose` does not change the states or the prompt."""
        fleet = self._fleet(num_replicas, seed)
        for _ in range(50):
            fleet.step()
            states = [array.copy() for array in fleet.arrays]
            request = fleet.request()
            tokens = request.token_ids.copy()
            fleet.policy.choose(request, fleet.states, fleet.now_s)
            assert all(map(np.array_equal, states, fleet.arrays)), "choose() changed the states"
            assert np.array_equal(tokens, request.token_ids), "choose() changed the prompt"

    def test_choices_are_deterministic(self, num_replicas: int, seed: int) -> None:
        """Equal contexts and equal calls give equal choices."""
        one, other = (self._fleet(num_replicas, seed) for _ in range(2))
        assert [one.step() for _ in range(100)] == [other.step() for _ in range(100)]

    def test_replicas_may_fail_between_calls(self, num_replicas: int, seed: int) -> None:
        """Each method accepts a replica that is not ready."""
        fleet = self._fleet(num_replicas, seed)
        for _ in range(20):
            fleet.step()
        request, policy = fleet.request(), fleet.policy
        replica = int(policy.choose(request, fleet.states, fleet.now_s))
        fleet.states.ready[replica] = False
        policy.sent(request, replica)
        policy.stored(replica, request.digests)
        policy.started(request, replica)
        policy.removed(replica, request.digests)
        policy.ended(request, replica, 3)
        policy.cleared(replica)
        fleet.states.ready[replica] = True
        fleet.step()

    def test_unknown_blocks_are_ignored(self, num_replicas: int, seed: int) -> None:
        """`removed` ignores digests that the replica does not hold, and `cleared` a replica that holds nothing."""
        policy = self.create(RoutingContext(num_replicas, seed=seed))
        policy.removed(0, [1, 2, 3])
        policy.cleared(num_replicas - 1)
        policy.stored(0, [1, 2])
        policy.removed(num_replicas - 1, [2, 7])
        policy.removed(0, [2, 2])
        policy.cleared(0)
        policy.cleared(0)
        policy.removed(0, [1])

    def test_a_cleared_replica_is_like_a_new_one(self, num_replicas: int, seed: int) -> None:
        """After `cleared`, the choice does not depend on what the replica held."""
        one, other = (self._fleet(num_replicas, seed) for _ in range(2))
        held = [one.request().digests for _ in range(10)]
        for digests in held:
            for replica in range(num_replicas):
                one.policy.stored(replica, digests)
        for fleet in (one, other):
            for replica in range(num_replicas):
                fleet.policy.cleared(replica)
        request = FakeRoutedRequest(one.prompt(), digests=held[0])
        choices = [int(fleet.policy.choose(request, fleet.states, fleet.now_s)) for fleet in (one, other)]
        assert choices[0] == choices[1], "the choice after cleared() depends on blocks that were stored before"

    def test_events_need_blocks(self, num_replicas: int, seed: int) -> None:
        """`block_tokens` is None or a power of two. A policy that `uses_cache_events` has blocks of whole pages."""
        for page_size in (1, 1024):
            policy = self.create(RoutingContext(num_replicas, page_size, seed))
            tokens = policy.block_tokens
            assert tokens is None or (tokens > 0 and not tokens & (tokens - 1)), f"block_tokens is {tokens}"
            if policy.uses_cache_events:
                assert tokens is not None, "the policy uses cache events without block_tokens"
                assert tokens >= page_size, f"blocks of {tokens} tokens are smaller than pages of {page_size}"

    def _fleet(self, num_replicas: int, seed: int) -> "_Fleet":
        return _Fleet(self.create(RoutingContext(num_replicas, seed=seed)), num_replicas, seed)


class _Fleet:
    """Replicas with random requests, whose caches hold random parts of the prompts that they have computed."""

    def __init__(self, policy: RoutingPolicy, num_replicas: int, seed: int) -> None:
        self.policy = policy
        self.states = ReplicaStates.idle(num_replicas, ready=True)
        self.now_s = 1000.0
        self._draw = random.Random(seed)
        self._block_tokens = policy.block_tokens or 16
        self._digests = BlockDigests(self._block_tokens)
        self._running: list[tuple[RoutedRequest, int]] = []

    @property
    def arrays(self) -> list[Any]:
        states = self.states
        return [states.ready, states.num_requests, states.queued_tokens, states.reported_s]

    def prompt(self) -> TokenIds:
        """Return a prompt of 1 token to 6 blocks; many prompts share their first blocks."""
        num_tokens = self._draw.choice([1, self._block_tokens, self._draw.randrange(1, 6 * self._block_tokens)])
        shared = np.full(num_tokens, self._draw.randrange(3), dtype=np.int32)
        shared[self._draw.randrange(num_tokens) :] += self._draw.randrange(4)
        return shared

    def request(self) -> RoutedRequest:
        tokens, namespace = self.prompt(), self._draw.choice(["", "", "tenant"])
        digests = self._digests.of_prompt(tokens, namespace) if self.policy.block_tokens else ()
        return FakeRoutedRequest(tokens, namespace, self._draw.choice([None, None, "a", "b"]), digests)

    def step(self) -> int:
        """Change the states, and route one request. Return the choice."""
        self.now_s += self._draw.random() * 3
        self._change_states()
        request = self.request()
        chosen = self.policy.choose(request, self.states, self.now_s)
        replica = int(chosen) if 0 <= chosen < len(self.states.ready) else 0
        self.policy.sent(request, replica)
        self.states.num_requests[replica] += 1
        self.states.queued_tokens[replica] += len(request.token_ids)
        self._running.append((request, replica))
        while len(self._running) > 8:
            self._end(*self._running.pop(self._draw.randrange(len(self._running))))
        return chosen

    def _end(self, request: RoutedRequest, replica: int) -> None:
        self.states.queued_tokens[replica] -= len(request.token_ids)
        if self._draw.random() < 0.8:
            self.states.reported_s[replica] = self.now_s
            self.policy.stored(replica, request.digests)
            self.policy.started(request, replica)
            if self._draw.random() < 0.3:
                self.policy.removed(replica, request.digests[1:])
        self.policy.ended(request, replica, self._draw.randrange(100))
        self.states.num_requests[replica] -= 1

    def _change_states(self) -> None:
        replica = self._draw.randrange(len(self.states.ready))
        self.states.ready[replica] = not self.states.ready[replica]
        if not self.states.ready[replica]:
            self.policy.cleared(replica)
        if not self.states.ready.any():
            self.states.ready[replica] = True
