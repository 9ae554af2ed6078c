"""Requests of higher priority replace requests of lower priority, and nothing else changes."""

import itertools

import pytest

from graftlm.scheduling import RequestStatus
from graftlm_scheduling.lpm import LongestPrefixMatch
from graftlm_scheduling.options import PreemptivePriorityOptions, ReorderingOptions
from graftlm_scheduling.priority import PreemptivePriority


def preemptive(**options):
    return PreemptivePriority(PreemptivePriorityOptions(**options))


def running(rig):
    return sorted(r.request_id for r in rig.requests.values() if r.status is RequestStatus.RUNNING)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_without_a_row_replaces_the_least_important_latest_request(make_rig, overlap):
    rig = make_rig(num_rows=3, policy=preemptive(), overlap=overlap)
    for name, priority in [("a", 1), ("b", 0), ("c", 0)]:
        rig.add(name, [1, 2], max_new_tokens=40, priority=priority)
        rig.step()
    rig.add("urgent", [3, 4], priority=2)
    rig.step()
    assert running(rig) == ["a", "b", "urgent"]
    rig.run()
    assert [rig.requests[name].num_retractions for name in ("a", "b", "c", "urgent")] == [0, 0, 1, 0]
    for name in rig.requests:
        rig.assert_right(name)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_without_pages_replaces_only_as_many_as_needed(make_rig, overlap):
    rig = make_rig(num_pages=64, num_rows=8, policy=preemptive(), overlap=overlap)
    for i in range(5):
        rig.add(f"low{i}", [i] * 10, max_new_tokens=3)
    rig.step()
    assert len(running(rig)) == 5
    rig.add("urgent", range(30), max_new_tokens=3, priority=1)
    rig.step()
    assert "urgent" in running(rig)
    assert 1 <= rig.scheduler.counters.retractions < 5
    assert rig.requests["low0"].num_retractions == 0
    rig.run()
    for name in rig.requests:
        rig.assert_right(name)


@pytest.mark.parametrize(
    ("policy", "priority"),
    [
        (preemptive(), 5),
        (preemptive(), 4),
        (preemptive(min_difference=3), 7),
        (preemptive(preempt=False), 9),
        (LongestPrefixMatch(ReorderingOptions()), 9),
    ],
    ids=["equal", "lower", "not enough above", "switched off", "a policy that does not preempt"],
)
def test_a_policy_without_preemption_or_difference_retracts_no_request(make_rig, policy, priority):
    rig = make_rig(num_rows=1, policy=policy)
    rig.add("first", [1], max_new_tokens=10, priority=5)
    rig.step()
    rig.add("second", [2], priority=priority)
    rig.run()
    assert rig.scheduler.counters.retractions == 0
    for name in rig.requests:
        rig.assert_right(name)


def test_min_difference_sets_the_required_difference(make_rig):
    rig = make_rig(num_rows=1, policy=preemptive(min_difference=3))
    rig.add("first", [1], max_new_tokens=10, priority=5)
    rig.step()
    rig.add("second", [2], priority=8)
    rig.step()
    assert running(rig) == ["second"]


def test_no_request_is_retracted_if_there_is_room(make_rig):
    rig = make_rig(num_rows=4, policy=preemptive())
    rig.add("low", [1], max_new_tokens=10)
    rig.step()
    rig.add("high", [2], priority=1)
    rig.step()
    assert running(rig) == ["high", "low"]


def test_no_request_is_retracted_if_it_would_not_help(make_rig):
    """The pages of more important requests cannot be taken, and less important requests have too few."""
    rig = make_rig(num_pages=64, num_rows=4, policy=preemptive())
    rig.add("high", range(48), max_new_tokens=5, priority=2)
    rig.add("low", [7], max_new_tokens=5)
    rig.step()
    assert running(rig) == ["high", "low"]
    rig.add("large", [8] * 30, max_new_tokens=5, priority=1)
    rig.step()
    assert running(rig) == ["high", "low"]
    rig.run()
    assert rig.scheduler.counters.retractions == 0


def test_several_requests_can_be_admitted_in_one_step(make_rig):
    rig = make_rig(num_rows=4, policy=preemptive())
    for i in range(4):
        rig.add(f"low{i}", [i], max_new_tokens=20)
    rig.step()
    for i in range(3):
        rig.add(f"high{i}", [10 + i], max_new_tokens=20, priority=1)
    rig.step()
    assert running(rig) == ["high0", "high1", "high2", "low0"]


def test_a_retracted_request_is_admitted_before_later_arrivals(make_rig):
    rig = make_rig(num_rows=1, policy=preemptive())
    rig.add("low", [1], max_new_tokens=10)
    rig.step()
    rig.add("later", [2], max_new_tokens=2)
    rig.add("high", [3], max_new_tokens=2, priority=1)
    order = []
    while rig.scheduler.has_work:
        rig.step()
        order += running(rig)
    assert [name for name, _ in itertools.groupby(order)] == ["high", "low", "later"]
    assert rig.requests["low"].num_retractions == 1


def test_the_prompt_of_a_retracted_request_is_found_in_the_cache(make_rig):
    rig = make_rig(num_rows=1, policy=preemptive())
    rig.add("low", range(40), max_new_tokens=10)
    for _ in range(5):
        rig.step()
    rig.add("high", [1, 2], max_new_tokens=1, priority=1)
    before = len(rig.plans)
    rig.run()
    computed_again = sum(plan.num_tokens - len(plan.device_idx) for plan in rig.plans[before:])
    assert computed_again == 2 + 1  # the other request's prompt, and the one token that is needed to continue
    rig.assert_right("low")


@pytest.mark.parametrize(("page_size", "overlap", "prefill"), list(itertools.product([1, 4], [False, True], [5, 64])))
def test_many_requests_of_mixed_priorities_get_their_tokens(make_rig, page_size, overlap, prefill):
    rig = make_rig(
        num_pages=160 // page_size,
        page_size=page_size,
        num_rows=3,
        prefill_tokens=prefill,
        overlap=overlap,
        policy=preemptive(),
    )
    for i in range(40):
        rig.add(f"r{i}", [i % 7] * (1 + i % 20), max_new_tokens=1 + i % 30, priority=(i * 5) % 7)
        rig.step()
    rig.run()
    assert rig.scheduler.counters.retractions > 5
    for name in rig.requests:
        rig.assert_right(name)
