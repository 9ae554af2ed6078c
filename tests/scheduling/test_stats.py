"""The figures of `StepLoop.stats` about retracted work and evicted prefixes."""

import pytest


def test_a_retraction_counts_the_computed_tokens(make_rig):
    rig = make_rig(num_pages=256, prefill_tokens=64)
    rig.add("a", range(10), max_new_tokens=8)
    rig.add("b", range(20, 40), max_new_tokens=8)
    for _ in range(3):
        rig.step()
    rig.loop.settle()
    computed = sum(int(rig.scheduler.kv.table.computed[rig.requests[name].held_row]) for name in "ab")
    assert computed > 30
    assert rig.loop.stats().retracted_tokens == 0
    rig.loop.retract_all()
    assert rig.loop.stats().retracted_tokens == computed
    assert rig.loop.stats().retractions == 2
    rig.run()
    for name in "ab":
        rig.assert_right(name)


def test_a_retraction_for_lack_of_pages_counts_its_tokens(make_rig):
    rig = make_rig(num_pages=48)
    for i in range(4):
        rig.add(f"r{i}", [i, i + 1, i + 2], max_new_tokens=30)
    rig.run()
    stats = rig.loop.stats()
    assert stats.retractions > 0
    assert stats.retracted_tokens >= 3 * stats.retractions  # each retraction counts at least the prompt


@pytest.mark.parametrize("page_size", [1, 4])
def test_evicted_tokens_and_their_age_are_those_of_the_least_recently_used_prefix(make_rig, page_size):
    rig = make_rig(num_pages=64 // page_size, page_size=page_size)
    rig.add("old", range(32), max_new_tokens=1)
    rig.run()
    assert (rig.loop.stats().evicted_tokens, rig.loop.stats().eviction_age_s) == (0, None)
    used_s = rig.now
    rig.now += 100.0
    rig.add("new", [45] * 48, max_new_tokens=1)
    rig.run()
    stats = rig.loop.stats()
    assert stats.evicted_tokens == stats.evicted_pages * page_size > 0
    assert stats.eviction_age_s == pytest.approx(100.0, abs=0.1)
    assert used_s + stats.eviction_age_s <= rig.now
