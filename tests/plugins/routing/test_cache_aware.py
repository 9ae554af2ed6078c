"""`cache_aware` weighs hits, queues and work, and keeps its bounds."""

import itertools

import numpy as np
import pytest

from graftlm.contracts import ReplicaStates, RoutingContext
from graftlm.testing import FakeRoutedRequest
from graftlm_routing.cache_aware import CacheAware
from graftlm_routing.options import CacheAwareOptions

BLOCK = 16
fresh = itertools.count(1000)


def request(digests=None, num_blocks=4):
    """Return a request with these digests, then with new ones, of `num_blocks` blocks in total."""
    known = list(digests or ())
    found = known + [next(fresh) for _ in range(num_blocks - len(known))]
    return FakeRoutedRequest(np.zeros(len(found) * BLOCK, dtype=np.int32), digests=found)


class Fleet:
    """A policy, and the states of its replicas as a router keeps them."""

    def __init__(self, num_replicas=3, **options):
        defaults = {"block_tokens": BLOCK, "slack_requests": 100.0}
        self.policy = CacheAware(CacheAwareOptions(**defaults | options), RoutingContext(num_replicas))
        self.states = ReplicaStates.idle(num_replicas, ready=True)
        self.now_s = 100.0
        self.states.reported_s[:] = self.now_s

    def choose(self, request):
        return self.policy.choose(request, self.states, self.now_s)

    def send(self, request, replica=None):
        replica = self.choose(request) if replica is None else replica
        self.policy.sent(request, replica)
        self.states.num_requests[replica] += 1
        return replica

    def finish(self, request, replica, *, stored=True, num_output_tokens=0):
        if stored:
            self.policy.stored(replica, request.digests)
            self.policy.started(request, replica)
        self.policy.ended(request, replica, num_output_tokens)
        self.states.num_requests[replica] -= 1


def test_the_longest_cached_prefix_is_chosen():
    fleet, shared = Fleet(), [1, 2, 3, 4]
    fleet.policy.stored(0, shared[:1])
    fleet.policy.stored(1, shared[:3])
    fleet.policy.stored(2, shared[:2])
    assert fleet.choose(request(shared)) == 1
    fleet.policy.removed(1, shared[1:3])
    assert fleet.choose(request(shared)) == 2
    fleet.policy.cleared(2)
    assert fleet.choose(request(shared)) == 0


def test_a_prefix_that_is_being_computed_attracts_requests():
    fleet = Fleet()
    first = request()
    replica = fleet.send(first)
    fleet.send(request(), (replica + 1) % 3)
    assert fleet.choose(request(first.digests)) == replica
    fleet.finish(first, replica, stored=False)  # it was aborted, and nothing is cached
    assert fleet.choose(request(first.digests)) != replica


def test_a_long_queue_outweighs_a_short_prefix():
    fleet, shared = Fleet(num_replicas=2, uncached_weight=2.0, balance_weight=0.0), [1]
    fleet.policy.stored(1, shared)
    assert fleet.choose(request(shared)) == 1  # saves 2 * 16 tokens
    fleet.send(request(num_blocks=1), 1)
    assert fleet.choose(request(shared)) == 1  # 16 tokens wait there
    fleet.send(request(num_blocks=3), 1)
    assert fleet.choose(request(shared)) == 0  # 64 tokens wait there


def test_new_prompts_are_spread_although_all_share_a_short_prefix():
    fleet, chosen = Fleet(num_replicas=4), []
    for _ in range(40):
        one = request([1], num_blocks=20)
        chosen.append(fleet.send(one))
        fleet.finish(one, chosen[-1])
    assert np.bincount(chosen).tolist() == [10, 10, 10, 10]


@pytest.mark.parametrize("imbalance", [0.0, 0.25])
def test_work_exceeds_the_bound_by_at_most_one_request(imbalance):
    fleet = Fleet(num_replicas=4, imbalance=imbalance, slack_requests=0.0, balance_weight=0.0, window_s=1e9)
    popular, tokens, work = request(num_blocks=8).digests, 40 * BLOCK, np.zeros(4)
    for _ in range(200):
        one = request(popular, num_blocks=40)
        replica = fleet.send(one)
        mean = work.mean()
        assert work[replica] <= (1 + imbalance) * mean + 1e-6
        work[replica] += tokens - (8 * BLOCK if work[replica] else 0)
        fleet.finish(one, replica)
        fleet.policy.removed(replica, one.digests[8:])
    assert work.max() <= (1 + imbalance) * work.mean() + tokens


def test_old_work_counts_less():
    fleet = Fleet(num_replicas=2, slack_requests=0.0, window_s=60.0)
    old, shared = request(num_blocks=100), request(num_blocks=50)
    fleet.finish(old, fleet.send(old, 0))
    fleet.policy.stored(0, shared.digests)
    assert fleet.choose(shared) == 1  # the bound excludes replica 0
    fleet.now_s += 600
    fleet.states.reported_s[:] = fleet.now_s
    for _ in range(3):
        new = request(num_blocks=10)
        fleet.choose(new)
        fleet.finish(new, fleet.send(new, 1))
    assert fleet.choose(shared) == 0
    fleet.now_s += 1e9  # units do not overflow
    assert fleet.choose(request()) in (0, 1)


def test_the_blocks_of_a_silent_replica_with_requests_are_ignored():
    fleet, shared = Fleet(num_replicas=2, max_staleness_s=5.0, balance_weight=0.0), request()
    fleet.policy.stored(1, shared.digests)
    fleet.states.num_requests[1] = 1
    fleet.now_s += 4
    assert fleet.choose(shared) == 1
    fleet.now_s += 2
    assert fleet.choose(shared) == 0
    fleet.states.num_requests[1] = 0  # an idle replica sends no messages
    assert fleet.choose(shared) == 1


def test_a_full_index_ignores_further_blocks_and_logs_it_once(caplog):
    fleet, first, second = Fleet(max_blocks=6), request(), request()
    for digests in (first.digests, second.digests, second.digests):
        fleet.policy.stored(1, digests)
    assert len(fleet.policy._index) == 6
    assert len(caplog.records) == 1
    fleet.policy.removed(1, first.digests)
    fleet.policy.stored(2, second.digests)
    assert fleet.choose(second) == 2


def test_many_flushes_leave_no_trace():
    fleet, shared = Fleet(num_replicas=2), request()
    for _ in range(200):
        for replica in (0, 1):
            fleet.policy.stored(replica, request().digests)
            fleet.policy.cleared(replica)
    fleet.policy.stored(1, shared.digests)
    assert fleet.choose(shared) == 1
    assert len(fleet.policy._index) < 4 * 70


def test_a_thousand_holders_of_a_prefix_are_compared():
    fleet, shared = Fleet(num_replicas=1000), request()
    for replica in range(1000):
        fleet.policy.stored(replica, shared.digests)
    fleet.policy._queued[:] = 500
    fleet.policy._queued[777] = 400
    assert fleet.choose(shared) == 777


def test_requests_with_long_outputs_are_spread_while_they_run():
    fleet = Fleet(num_replicas=4, slack_requests=8.0)
    for _ in range(30):
        one = request(num_blocks=20)
        fleet.finish(one, fleet.send(one), num_output_tokens=200)
    chosen = [fleet.send(FakeRoutedRequest()) for _ in range(16)]
    assert np.bincount(chosen, minlength=4).min() >= 3
