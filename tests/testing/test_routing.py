"""The kit for routing policies finds each broken sentence of the contract."""

import itertools

import numpy as np
import pytest

from graftlm.contracts import RoutingPolicy
from graftlm.testing import RoutingPolicyConformance, run_conformance


class LeastLoaded(RoutingPolicy):
    def choose(self, request, replicas, now_s):
        return replicas.least_loaded()


class IgnoresReady(LeastLoaded):
    def choose(self, request, replicas, now_s):
        return int(replicas.num_requests.argmin())


class ReturnsAnArray(LeastLoaded):
    def choose(self, request, replicas, now_s):
        return np.flatnonzero(replicas.ready)[:1]


class CountsItself(LeastLoaded):
    def choose(self, request, replicas, now_s):
        chosen = super().choose(request, replicas, now_s)
        replicas.num_requests[chosen] += 1
        return chosen


class ChangesThePrompt(LeastLoaded):
    def choose(self, request, replicas, now_s):
        request.token_ids[0] += 1
        return super().choose(request, replicas, now_s)


class SharesACounter(LeastLoaded):
    calls = itertools.count()

    def choose(self, request, replicas, now_s):
        ready = np.flatnonzero(replicas.ready)
        return int(ready[next(self.calls) % 7 % len(ready)])


class RefusesDeadReplicas(LeastLoaded):
    def choose(self, request, replicas, now_s):
        self.ready = replicas.ready
        return super().choose(request, replicas, now_s)

    def started(self, request, replica):
        if not self.ready[replica]:
            raise ValueError("a request of a dead replica")


class Holds(LeastLoaded):
    block_tokens = 16
    uses_cache_events = True

    def __init__(self):
        self.held = {}

    def choose(self, request, replicas, now_s):
        for digest in request.digests:
            for replica in self.held.get(digest, ()):
                if replicas.ready[replica]:
                    return replica
        return replicas.least_loaded()

    def stored(self, replica, digests):
        for digest in digests:
            self.held.setdefault(digest, []).append(replica)

    def removed(self, replica, digests):
        for digest in digests:
            self.held[digest].remove(replica)


class NeverClears(Holds):
    def stored(self, replica, digests):
        super().stored(replica, digests[::-1] if replica else ())

    def removed(self, replica, digests):
        pass


class NoBlocks(LeastLoaded):
    uses_cache_events = True


def failures(create):
    class Kit(RoutingPolicyConformance):
        def create(self, context):
            return create()

    return {result.name.partition("[")[0] for result in run_conformance(Kit) if result.error is not None}


def test_a_correct_policy_passes():
    assert failures(LeastLoaded) == set()


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (IgnoresReady, "test_choose_returns_a_ready_replica"),
        (ReturnsAnArray, "test_choose_returns_a_ready_replica"),
        (CountsItself, "test_choose_changes_neither_states_nor_prompt"),
        (ChangesThePrompt, "test_choose_changes_neither_states_nor_prompt"),
        (SharesACounter, "test_choices_are_deterministic"),
        (RefusesDeadReplicas, "test_replicas_may_fail_between_calls"),
        (Holds, "test_unknown_blocks_are_ignored"),
        (NeverClears, "test_a_cleared_replica_is_like_a_new_one"),
        (NoBlocks, "test_events_need_blocks"),
        (Holds, "test_events_need_blocks"),
    ],
)
def test_a_faulty_policy_fails_the_test_of_its_sentence(policy, test):
    assert test in failures(policy)
