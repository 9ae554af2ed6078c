"""The rules of the policies without cache events."""

import numpy as np
import pytest

from graftlm.contracts import ReplicaStates
from graftlm.testing import FakeRoutedRequest

from .test_conformance import make

REQUEST = FakeRoutedRequest()


def states(*num_requests):
    found = ReplicaStates.idle(len(num_requests), ready=True)
    found.num_requests[:] = num_requests
    return found


def prompt(digests, num_tokens=None, key=None):
    return FakeRoutedRequest(np.zeros(num_tokens or 4 * len(digests), dtype=np.int32), key=key, digests=digests)


def test_round_robin_skips_replicas_that_are_not_ready():
    policy, replicas = make("round_robin"), states(0, 0, 0, 0)
    replicas.ready[2] = False
    assert [policy.choose(REQUEST, replicas, 0.0) for _ in range(7)] == [0, 1, 3, 0, 1, 3, 0]


def test_random_chooses_all_ready_replicas_equally_often():
    policy, replicas = make("random"), states(0, 0, 9, 0)
    replicas.ready[0] = False
    counts = np.bincount([policy.choose(REQUEST, replicas, 0.0) for _ in range(3000)], minlength=4)
    assert counts[0] == 0
    assert counts[1:].min() > 900


def test_power_of_two_never_chooses_the_busiest():
    policy, replicas = make("power_of_two"), states(1, 1, 9, 1)
    assert {policy.choose(REQUEST, replicas, 0.0) for _ in range(100)} == {0, 1, 3}


def test_consistent_hash_moves_only_the_keys_of_a_failed_replica():
    policy, replicas = make("consistent_hash", 10, load_factor=None), states(*[0] * 10)

    def chosen():
        return [policy.choose(prompt([], 4, key=f"user {number}"), replicas, 0.0) for number in range(500)]

    before = chosen()
    assert np.bincount(before, minlength=10).min() > 25
    replicas.ready[3] = False
    assert all(new == old or old == 3 for old, new in zip(before, chosen(), strict=True))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (prompt([5, 6]), prompt([5, 7]), True),  # the same first block
        (prompt([5], key="a"), prompt([9], key="a"), True),
        (prompt([], 3), FakeRoutedRequest(np.zeros(3, dtype=np.int32)), True),  # the same short prompt
        (prompt([], 3), FakeRoutedRequest(np.zeros(3, dtype=np.int32), namespace="tenant"), False),
        (prompt([5]), prompt([6]), False),
    ],
)
def test_consistent_hash_uses_the_key_or_the_start_of_the_prompt(one, other, same):
    policy, replicas = make("consistent_hash", 500, load_factor=None), states(*[0] * 500)
    assert (policy.choose(one, replicas, 0.0) == policy.choose(other, replicas, 0.0)) == same


def test_consistent_hash_spreads_a_popular_key():
    policy, replicas = make("consistent_hash", 4, load_factor=1.25), states(0, 0, 0, 0)
    for _ in range(40):
        replicas.num_requests[policy.choose(prompt([1]), replicas, 0.0)] += 1
    assert replicas.num_requests.max() <= 13  # 1.25 times the mean, rounded up


def test_approximate_tree_follows_a_long_match_and_spreads_short_ones():
    policy, replicas = make("approximate_tree", 3, block_tokens=4), states(0, 0, 0)
    policy.sent(prompt([1, 2, 3, 4]), 1)
    assert policy.choose(prompt([1, 2, 3, 9]), replicas, 0.0) == 1
    assert policy.choose(prompt([1, 2, 8, 9]), replicas, 0.0) == 0  # the match is not more than half
    policy.sent(prompt([1, 2, 8, 9, 10]), 0)
    assert policy.choose(prompt([20]), replicas, 0.0) == 2  # its tree is empty
    policy.cleared(1)
    assert policy.choose(prompt([1, 2, 3, 4]), replicas, 0.0) == 1  # the first empty tree


@pytest.mark.parametrize(
    ("loads", "expected"), [((32, 0, 0), 0), ((33, 0, 0), 1), ((400, 370, 367), 0), ((400, 365, 370), 1)]
)
def test_approximate_tree_balances_when_both_thresholds_are_exceeded(loads, expected):
    policy, replicas = make("approximate_tree", 3, block_tokens=4, balance_rel_threshold=1.09), states(*loads)
    policy.sent(prompt([1, 2]), 0)
    assert policy.choose(prompt([1, 2]), replicas, 0.0) == expected


def test_approximate_tree_forgets_the_least_recently_used_blocks():
    policy, replicas = make("approximate_tree", 2, block_tokens=4, max_blocks=4), states(0, 0)
    for digests in ([1, 2], [3, 4], [1, 2], [5, 6]):
        policy.sent(prompt(digests), 1)
    policy.sent(prompt([7] * 9), 0)
    assert policy.choose(prompt([1, 2]), replicas, 0.0) == 1
    assert policy.choose(prompt([3, 4]), replicas, 0.0) == 0  # a replica with a smaller tree
    assert len(policy._holders) == 5
