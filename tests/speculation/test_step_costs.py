import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.speculation.step_costs import StepCosts


def measured(**steps_by_size) -> StepCosts:
    """Return the costs of steps, as `t4=0.5` for a step of 4 tokens in 0.5 s."""
    costs = StepCosts()
    for size, seconds in steps_by_size.items():
        costs.observe(int(size[1:]), seconds)
    return costs


def estimates(costs, *sizes):
    return costs.estimate(np.array(sizes)).tolist()


def test_a_measured_size_costs_what_was_measured():
    assert estimates(measured(t1=0.010, t8=0.012, t32=0.030), 1, 8, 32) == pytest.approx([0.010, 0.012, 0.030])


def test_sizes_between_are_interpolated():
    assert estimates(measured(t1=0.010, t5=0.030), 2, 3, 4) == pytest.approx([0.015, 0.020, 0.025])


def test_before_any_measurement_a_further_token_costs_little():
    one, two, eight = estimates(StepCosts(), 1, 2, 8)
    assert 1.0 < two / one < 1.1
    assert 1.1 < eight / one < 1.5


def test_sizes_beyond_those_measured_cost_more_than_these():
    costs = measured(t1=0.010, t2=0.010)
    two, four, hundred = estimates(costs, 2, 4, 100)
    assert two < four < hundred
    assert hundred < 100 * two


def test_sizes_below_those_measured_cost_no_more_than_these():
    one, four, eight = estimates(measured(t8=0.010), 1, 4, 8)
    assert 0 < one < four < eight == pytest.approx(0.010)


def test_a_device_without_times_changes_nothing():
    costs = StepCosts()
    costs.observe(1, 0.0)
    assert estimates(costs, 1, 2, 30) == estimates(StepCosts(), 1, 2, 30)


def test_the_average_follows_a_device_that_becomes_slower():
    costs = measured(t4=0.010)
    for _ in range(40):
        costs.observe(4, 0.015)
    assert estimates(costs, 4) == pytest.approx([0.015], rel=0.01)


def test_one_very_long_step_counts_as_twice_the_average():
    costs = measured(t4=0.010)
    costs.observe(4, 60.0)
    assert estimates(costs, 4) == pytest.approx([0.012])


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 10.0)), max_size=30),
    st.lists(st.integers(1, 6000), min_size=1, max_size=30),
)
def test_estimates_are_positive_and_never_fall_with_the_size(steps, sizes):
    costs = StepCosts()
    for num_tokens, seconds in steps:
        costs.observe(num_tokens, seconds)
    found = costs.estimate(np.array(sorted(sizes)))
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert (np.diff(found) >= 0).all()
