"""If waiting requests share an uncomputed prefix, one computes it and the others reuse it."""

import numpy as np
import pytest

from graftlm_scheduling.dfs_weight import DepthFirstByWeight
from graftlm_scheduling.fcfs import FirstComeFirstServed
from graftlm_scheduling.lpm import LongestPrefixMatch
from graftlm_scheduling.options import ReorderingOptions

POLICIES = {
    "lpm": lambda: LongestPrefixMatch(ReorderingOptions(max_wait_s=1000.0)),
    "dfs_weight": lambda: DepthFirstByWeight(ReorderingOptions(max_wait_s=1000.0)),
    "fcfs": FirstComeFirstServed,
}


def computed_tokens(rig):
    """Return the number of prompt tokens that the device computed, without rows that continue after a sample."""
    return sum(plan.num_tokens - len(plan.device_idx) for plan in rig.plans)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefill_tokens", [7, 50, 64, 1000])
@pytest.mark.parametrize("policy", POLICIES)
def test_siblings_do_not_compute_the_chunks_of_a_leader(make_rig, policy, prefill_tokens, overlap):
    rig = make_rig(
        num_pages=2048, num_rows=6, prefill_tokens=prefill_tokens, overlap=overlap, policy=POLICIES[policy]()
    )
    shared = np.random.default_rng(0).integers(0, 50, 300).tolist()
    for i in range(20):
        rig.add(f"r{i}", [*shared, i, 1, 2], max_new_tokens=3)
    rig.run()
    assert computed_tokens(rig) == 300 + 20 * 3
    for name in rig.requests:
        rig.assert_right(name)


@pytest.mark.parametrize(("policy", "is_optimal"), [("lpm", True), ("dfs_weight", True), ("fcfs", False)])
def test_groups_do_not_interleave_if_memory_holds_only_one(make_rig, policy, is_optimal):
    rig = make_rig(num_pages=150, num_rows=4, prefill_tokens=64, policy=POLICIES[policy]())
    tokens = np.random.default_rng(1)
    prefixes = [tokens.integers(0, 50, 100).tolist() for _ in range(6)]
    prompts = [[*prefixes[i % 6], i, 1] for i in range(48)]
    for i, prompt in enumerate(prompts):
        rig.add(f"r{i}", prompt, max_new_tokens=2)
    rig.run()
    assert rig.scheduler.kv.evicted_pages > 0
    distinct = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert (computed_tokens(rig) == len(distinct)) is is_optimal
    for name in rig.requests:
        rig.assert_right(name)


@pytest.mark.parametrize("policy", ["lpm", "dfs_weight"])
def test_no_request_is_passed_over_for_longer_than_the_bound(make_rig, policy):
    """A single request waits behind a group that never ends, and is admitted first at its time limit."""
    policies = {"lpm": LongestPrefixMatch, "dfs_weight": DepthFirstByWeight}
    rig = make_rig(num_rows=1, policy=policies[policy](ReorderingOptions(max_wait_s=0.1)))
    for i in range(3):
        rig.add(f"g{i}", [*range(20), i], max_new_tokens=2)
    rig.step()
    rig.add("loner", [49, 48], max_new_tokens=2)
    for i in range(3, 400):
        rig.add(f"g{i}", [*range(20), i % 50], max_new_tokens=2)
        rig.step()
    loner = rig.requests["loner"]
    assert loner.passed_over_s is not None
    assert loner.is_aged
    service_s = 0.002  # two steps: those of the request that runs at the time limit
    assert 0.1 <= loner.admitted_s - loner.passed_over_s <= 0.1 + service_s
    assert rig.scheduler.counters.aged_requests >= 1
