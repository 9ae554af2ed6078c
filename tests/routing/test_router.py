"""The router counts requests, calls the policy in the order of the contract, and survives its errors."""

import numpy as np
import pytest

from graftlm.contracts import RoutingPolicy
from graftlm.routing import BlockDigests, Router

TOKENS = np.arange(20, dtype=np.int32)


class Scripted(RoutingPolicy):
    """A policy that returns the given choices and records its calls."""

    def __init__(self, *choices, block_tokens=None):
        self.choices = list(choices)
        self.block_tokens = block_tokens
        self.calls = []

    def choose(self, request, replicas, now_s):
        self.calls.append(("choose", list(request.digests), now_s))
        choice = self.choices.pop(0)
        if isinstance(choice, Exception):
            raise choice
        return choice

    def sent(self, request, replica):
        self.calls.append(("sent", replica))

    def started(self, request, replica):
        self.calls.append(("started", replica))

    def ended(self, request, replica, num_output_tokens):
        self.calls.append(("ended", replica, num_output_tokens))

    def stored(self, replica, digests):
        self.calls.append(("stored", replica, digests))

    def removed(self, replica, digests):
        self.calls.append(("removed", replica, digests))

    def cleared(self, replica):
        self.calls.append(("cleared", replica))


def make(policy=None, num_replicas=3):
    router = Router(num_replicas, policy, clock=lambda: 7.0)
    router.states.ready[:] = True
    return router


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([], None),
        ([(False, 0, 0)], None),
        ([(True, 10, 0), (True, 9, 50)], 1),
        ([(True, 5, 3), (True, 5, 2)], 1),
        ([(True, 5, 2), (True, 5, 2)], 0),
        ([(False, 0, 0), (True, 100, 9)], 1),
    ],
)
def test_without_a_policy_the_ready_replica_with_the_fewest_queued_tokens_is_chosen(replicas, expected):
    router = Router(len(replicas))
    for number, (ready, queued, num_requests) in enumerate(replicas):
        router.states.ready[number] = ready
        router.states.queued_tokens[number] = queued
        router.states.num_requests[number] = num_requests
    assert router.choose(router.route(TOKENS)) == expected


def test_a_policy_hears_of_each_stage_of_a_request():
    policy = Scripted(2, block_tokens=8)
    router = make(policy)
    route = router.route(TOKENS, "tenant")
    assert router.choose(route) == 2
    router.sent(route, 2)
    assert (router.states.num_requests.tolist(), router.states.queued_tokens.tolist()) == ([0, 0, 1], [0, 0, 20])
    router.started(route)
    router.started(route)
    assert router.states.queued_tokens.tolist() == [0, 0, 0]
    router.ended(route, 5)
    assert router.states.num_requests.tolist() == [0, 0, 0]
    digests = list(BlockDigests(8).of_prompt(TOKENS, "tenant"))
    assert policy.calls == [("choose", digests, 7.0), ("sent", 2), ("started", 2), ("ended", 2, 5)]


def test_a_request_may_end_without_a_token():
    router = make()
    route = router.route(TOKENS)
    router.sent(route, 1)
    router.ended(route, 0)
    assert not router.states.num_requests.any()
    assert not router.states.queued_tokens.any()


def test_reports_reach_the_policy_in_their_order():
    policy = Scripted()
    router = make(policy)
    router.report(1, [("stored", [1, 2]), ("removed", [2]), ("cleared", [])])
    router.clear(2)
    assert policy.calls == [("stored", 1, [1, 2]), ("removed", 1, [2]), ("cleared", 1), ("cleared", 2)]
    assert router.states.reported_s.tolist() == [-np.inf, 7.0, -np.inf]


@pytest.mark.parametrize("choice", [RuntimeError("broken"), 3, -1, None, "0", 1])
def test_a_wrong_choice_is_logged_once_and_replaced(choice, caplog):
    router = make(Scripted(choice, choice))
    router.states.ready[1] = False
    router.states.queued_tokens[0] = 5
    assert [router.choose(router.route(TOKENS)) for _ in range(2)] == [2, 2]
    assert len(caplog.records) == 1
    assert "Scripted" in caplog.text
