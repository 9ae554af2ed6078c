"""The conformance kit for scheduling policies."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from graftlm.contracts import Preemption, PrefixGroup, SchedulingContext, SchedulingPolicy
from graftlm.testing.conformance import Conformance

__all__ = ["FakePrefixGroup", "FakeWaitingRequest", "SchedulingPolicyConformance"]


@dataclass(frozen=True, slots=True, eq=False)
class FakePrefixGroup:
    """A `PrefixGroup` with fixed values."""

    num_tokens: int = 8
    num_waiting: int = 2
    parent: PrefixGroup | None = None


@dataclass(frozen=True, slots=True)
class FakeWaitingRequest:
    """A `WaitingRequest` with fixed values."""

    request_id: str
    arrival_s: float = 0.0
    priority: int = 0
    num_tokens: int = 16
    max_new_tokens: int = 16
    cached_tokens: int = 0
    group: PrefixGroup | None = None


class SchedulingPolicyConformance(Conformance, ABC):
    """The kit for the contract `SchedulingPolicy`.

        class TestMyPolicy(SchedulingPolicyConformance):
            def create(self, context):
                return MyPolicy()

    Attributes:
        parameters: `num_requests` is the number of waiting requests. `seed` is the seed of the random requests and
            of the policy.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"num_requests": (0, 1, 2, 40, 1000), "seed": (0, 1)}

    @abstractmethod
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        """Return a new policy."""

    def test_order_is_a_permutation(self, num_requests: int, seed: int) -> None:
        """`order` returns a permutation of the waiting requests."""
        policy = self.create(SchedulingContext(seed))
        waiting = _draw(num_requests, seed)
        for now in (100.0, 101.0):
            ordered = policy.order(list(waiting), now)  # a copy, because a faulty policy might change its argument
            assert len(ordered) == num_requests, f"order() returned {len(ordered)} of {num_requests} requests"
            assert {id(request) for request in ordered} == {id(request) for request in waiting}, (
                "order() left out or repeated a request"
            )

    def test_order_returns_a_new_list_and_changes_nothing(self, num_requests: int, seed: int) -> None:
        """`order` returns a new list and does not change its argument."""
        waiting = _draw(num_requests, seed)
        given = list(waiting)
        ordered = self.create(SchedulingContext(seed)).order(given, 100.0)
        assert isinstance(ordered, list), f"order() returned {type(ordered).__name__}, expected a list"
        assert ordered is not given, "order() returned its argument instead of a new list"
        assert given == waiting, "order() changed its argument"

    def test_order_takes_any_sequence(self, num_requests: int, seed: int) -> None:
        """`order` accepts any `Sequence`, for example a tuple."""
        waiting = _draw(num_requests, seed)
        from_list = self.create(SchedulingContext(seed)).order(list(waiting), 100.0)
        assert self.create(SchedulingContext(seed)).order(tuple(waiting), 100.0) == from_list

    def test_order_is_deterministic(self, num_requests: int, seed: int) -> None:
        """`order` gives the same result for the same requests, clock reading and seed."""
        one, other = (self.create(SchedulingContext(seed)) for _ in range(2))
        for now in (100.0, 100.5):
            orders = [policy.order(_draw(num_requests, seed), now) for policy in (one, other)]
            first, second = ([request.request_id for request in order] for order in orders)
            assert first == second, f"order() differs for equal input, seed {seed} and now={now}"

    def test_who_reorders_says_how_long_one_may_wait(self, num_requests: int, seed: int) -> None:
        """`max_wait_s` is None for a policy that never reorders, and a number above 0 for other policies."""
        policy = self.create(SchedulingContext(seed))
        waiting = _draw(num_requests, seed)
        if policy.max_wait_s is None:
            assert policy.order(list(waiting), 100.0) == waiting, "the policy reorders, so it needs a max_wait_s"
        else:
            assert policy.max_wait_s > 0

    def test_preemption_needs_a_higher_priority(self, num_requests: int, seed: int) -> None:
        """`preemption` is None, or a `Preemption` with a `min_difference` of at least 1."""
        preemption = self.create(SchedulingContext(seed)).preemption
        if preemption is not None:
            assert isinstance(preemption, Preemption), f"preemption is a {type(preemption).__name__}"
            assert preemption.min_difference >= 1, "requests of equal priority would preempt each other again and again"


def _draw(num_requests: int, seed: int) -> list[FakeWaitingRequest]:
    """Return random requests in order of arrival; several requests have equal values of each sort key."""
    draw = random.Random(seed)
    outer = FakePrefixGroup(num_tokens=1, num_waiting=num_requests)
    groups = [None, outer, FakePrefixGroup(16, 3, outer), FakePrefixGroup(16, 3, outer), FakePrefixGroup(8, 2)]
    requests = []
    for request_idx in range(num_requests):
        num_tokens = draw.randrange(1, 5000)
        requests.append(
            FakeWaitingRequest(
                request_id=f"request-{request_idx}",
                arrival_s=float(request_idx // 2),
                priority=draw.randrange(-1, 2),
                num_tokens=num_tokens,
                max_new_tokens=draw.choice([1, 16, 4096]),
                cached_tokens=draw.choice([0, 0, num_tokens // 2, num_tokens - 1]),
                group=draw.choice(groups),
            )
        )
    return requests
