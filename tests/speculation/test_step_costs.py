import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.speculation.step_costs import StepCosts


def learned(decode_s, verify_s, rounds=60) -> StepCosts:
    """Return costs after rounds of decode steps and steps with drafts, with their seconds by number of tokens."""
    costs = StepCosts()
    for _ in range(rounds):
        for num_tokens, seconds in decode_s.items():
            costs.observe(num_tokens, seconds)
        for num_tokens, seconds in verify_s.items():
            costs.observe(num_tokens, seconds, has_drafts=True)
    return costs


def test_before_any_measurement_a_further_token_costs_little():
    times = StepCosts().estimate(1, 7)
    assert times[0] == 1.0
    assert 1.0 < times[1] < 1.1
    assert 1.1 < times[7] < 1.5


def test_measured_steps_are_estimated_by_their_ratio():
    times = learned({1: 0.010}, {4: 0.013, 16: 0.030}).estimate(1, 15)
    assert times[[0, 3, 15]] == pytest.approx([1.0, 1.3, 3.0], rel=0.05)


def test_sizes_between_the_measured_ones_are_interpolated():
    times = learned({1: 0.010}, {4: 0.012, 16: 0.030}).estimate(1, 15)
    assert 1.2 < times[9] < 3.0


def test_steps_with_drafts_may_cost_more_than_decode_steps_of_as_many_tokens():
    costs = learned({4: 0.010, 8: 0.011}, {8: 0.016})
    assert costs.estimate(4, 4)[4] == pytest.approx(1.6, rel=0.05)
    assert costs.estimate(8, 0).tolist() == [1.0]


def test_only_ratios_count():
    slow = learned({1: 1.0}, {8: 2.0}).estimate(1, 7)
    assert slow == pytest.approx(learned({1: 0.001}, {8: 0.002}).estimate(1, 7))


def test_a_change_of_the_machines_speed_changes_no_estimate():
    costs = learned({1: 0.010}, {8: 0.015})
    before = costs.estimate(1, 7)
    for _ in range(50):
        for num_tokens, seconds, has_drafts in ((1, 0.030, False), (8, 0.045, True)):
            costs.observe(num_tokens, seconds, has_drafts=has_drafts)
    assert costs.estimate(1, 7) == pytest.approx(before, rel=0.05)


def test_one_very_long_step_changes_an_estimate_little():
    costs = learned({1: 0.010}, {8: 0.015})
    before = costs.estimate(1, 7)[7]
    costs.observe(8, 60.0, has_drafts=True)
    costs.observe(1, 0.010)
    assert costs.estimate(1, 7)[7] == pytest.approx(before, rel=0.2)


def test_a_size_that_is_no_longer_used_returns_to_its_first_estimate():
    costs = learned({1: 0.010}, {64: 0.200})
    high = costs.estimate(1, 63)[63]
    for _ in range(4000):
        costs.observe(1, 0.010)
        costs.observe(2, 0.010)
    assert costs.estimate(1, 63)[63] < high / 2


def test_a_device_without_times_changes_nothing():
    costs = StepCosts()
    costs.observe(1, 0.0)
    costs.observe(8, 0.0, has_drafts=True)
    assert costs.estimate(1, 30).tolist() == StepCosts().estimate(1, 30).tolist()


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 10.0), st.booleans()), max_size=30),
    st.integers(1, 6000),
    st.integers(0, 100),
)
def test_estimates_begin_with_1_and_never_decrease(steps, num_rows, max_drafts):
    costs = StepCosts()
    for num_tokens, seconds, has_drafts in steps:
        costs.observe(num_tokens, seconds, has_drafts=has_drafts)
    found = costs.estimate(num_rows, max_drafts)
    assert found.shape == (max_drafts + 1,)
    assert np.isfinite(found).all()
    assert found[0] == 1.0
    assert (np.diff(found) >= 0).all()
