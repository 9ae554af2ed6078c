import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.speculation.draft_budget import MAX_DRAFTED_TOKENS, DraftBudget
from graftlm.speculation.step_costs import StepCosts


class TableCosts(StepCosts):
    """Costs of steps from a table of seconds by number of tokens, interpolated."""

    def __init__(self, seconds_by_size) -> None:
        super().__init__()
        self._sizes, self._seconds = list(seconds_by_size), list(seconds_by_size.values())

    def estimate(self, num_rows, max_drafts):
        times = np.interp(num_rows + np.arange(max_drafts + 1), self._sizes, self._seconds)
        return np.maximum.accumulate(times / times[0])

    def optimistic(self, num_rows, max_drafts):
        return self.estimate(num_rows, max_drafts)

    def is_better(self, num_rows, gain):
        return True


#: A device that reads weights: 64 tokens take hardly longer than one.
CHEAP = TableCosts({1: 0.0100, 8: 0.0101, 64: 0.0105})
#: A device that computes: each token takes as long as the first.
DEAR = TableCosts({size: 0.01 * size for size in (1, 2, 4, 8, 16, 32, 64, 2000)})
#: Like CHEAP up to 16 tokens, like DEAR from there.
LIMITED = TableCosts({1: 0.010, 16: 0.010, 32: 0.020, 64: 0.040, 2000: 1.25})


def test_likely_drafts_are_taken_whole_where_tokens_are_cheap():
    assert DraftBudget(CHEAP, 15).lengths(2, [0.95, 0.95], [15, 7]) == [15, 7]
    assert DraftBudget(CHEAP, 15).may_pay(2)


@pytest.mark.parametrize("costs", [CHEAP, DEAR, LIMITED, StepCosts()])
def test_rejected_drafts_are_not_taken(costs):
    assert DraftBudget(costs, 15).lengths(3, [0.0, 0.0, 0.0], [15, 1, 4]) == [0, 0, 0]


def test_no_draft_is_taken_where_each_token_costs_a_step():
    assert DraftBudget(DEAR, 15).lengths(1, [0.99], [15]) == [0]
    assert not DraftBudget(DEAR, 15).may_pay(1)


def test_large_batches_have_no_drafts_where_small_ones_have():
    budget = DraftBudget(LIMITED, 15)
    assert budget.lengths(2, [0.8] * 2, [7] * 2) == [7, 7]
    assert budget.lengths(64, [0.8] * 64, [7] * 64) == [0] * 64
    assert budget.may_pay(2)
    assert not budget.may_pay(64)


def test_the_most_likely_tokens_are_taken_first():
    first, second, third = DraftBudget(LIMITED, 15).lengths(3, [0.9, 0.5, 0.1], [15, 15, 15])
    assert first > second > third


def test_longer_steps_are_for_likelier_drafts():
    budget = DraftBudget(TableCosts({1: 0.010, 4: 0.011, 16: 0.015}), 15)
    lengths = [budget.lengths(1, [rate], [15])[0] for rate in (0.01, 0.2, 0.5, 0.9, 0.99)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[1] < lengths[-1] == 15


@pytest.mark.parametrize("num_rows", [1, 5])
def test_without_drafts_there_is_nothing_to_choose(num_rows):
    assert DraftBudget(CHEAP, 15).lengths(num_rows, [], []) == []
    assert DraftBudget(CHEAP, 15).lengths(num_rows, [0.9], [0]) == [0]


DRAFTS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 15)), max_size=12)
STEPS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32, 64, 128]), st.floats(1e-4, 1.0), st.booleans()), max_size=12
)


def costs_of(steps) -> StepCosts:
    """Return the costs learned from steps: (number of tokens, seconds, whether it has drafts)."""
    costs = StepCosts()
    for num_tokens, seconds, has_drafts in steps:
        costs.observe(num_tokens, seconds, has_drafts=has_drafts)
    return costs


@given(steps=STEPS, drafts=DRAFTS, num_others=st.integers(0, 40))
def test_the_expected_speed_is_never_below_that_without_drafts(steps, drafts, num_others):
    costs = costs_of(steps)
    num_rows = len(drafts) + num_others
    rates, limits = [rate for rate, _ in drafts], [limit for _, limit in drafts]
    if not num_rows:
        return
    lengths = DraftBudget(costs, 15).lengths(num_rows, rates, limits)
    assert len(lengths) == len(drafts)
    assert all(0 <= length <= limit for length, limit in zip(lengths, limits, strict=True))
    if not any(lengths):
        return
    num_tokens = num_rows + sum(sum(rate**i for i in range(1, n + 1)) for rate, n in zip(rates, lengths, strict=True))
    assert num_tokens > num_rows * costs.estimate(num_rows, sum(lengths))[-1]


@given(steps=STEPS, num_rows=st.integers(1, 40), rate=st.floats(0, 0.95), limit=st.integers(1, 15))
def test_what_may_not_pay_is_not_taken(steps, num_rows, rate, limit):
    budget = DraftBudget(costs_of(steps), 15)
    lengths = budget.lengths(num_rows, [rate] * num_rows, [limit] * num_rows)
    assert budget.may_pay(num_rows) or not any(lengths)


class Free(StepCosts):
    """Costs of steps that take the same time with any number of tokens."""

    def estimate(self, num_rows, max_drafts):
        return np.ones(max_drafts + 1)

    optimistic = estimate

    def is_better(self, num_rows, gain):
        return True


def test_a_step_has_a_maximum_number_of_drafted_tokens():
    assert sum(DraftBudget(Free(), 64).lengths(64, [0.999] * 64, [64] * 64)) == MAX_DRAFTED_TOKENS == 512
    assert DraftBudget(Free(), 64).lengths(2, [0.999] * 2, [64] * 2) == [64, 64]
