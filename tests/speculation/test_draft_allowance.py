from itertools import cycle

import numpy as np
import pytest

from graftlm.contracts import Draft, Drafter, DraftRequest
from graftlm.speculation import SourcedDraft, Speculator
from graftlm.speculation.draft_allowance import DraftAllowance
from graftlm.testing.drafter import AllDrafts

TOKENS = np.array([1, 2, 3, 4], dtype=np.int32)


class Slow(Drafter):
    """Takes `seconds` of a clock for each call."""

    def __init__(self, seconds, is_expensive=True):
        self.now = 0.0
        self.num_calls = 0
        self._seconds = seconds
        self._is_expensive = is_expensive

    @property
    def is_expensive(self):
        return self._is_expensive

    def propose(self, requests):
        self.now += self._seconds
        self.num_calls += 1
        return [Draft(TOKENS, 0.9) for _ in requests]


def calls_in(drafter, num_steps, num_accepted, step_s=0.010):
    """Return how often a drafter is asked in some steps of one request whose drafts have that many right tokens."""
    speculator = Speculator({"slow": drafter}, 4, 10, AllDrafts(4), lambda: drafter.now)
    request = DraftRequest(0, "", TOKENS, 4)
    for _ in range(num_steps):
        drafts = speculator.propose([request])
        speculator.observe_step(1, 1 + 4 * len(drafts), step_s)
        if drafts:
            speculator.observe(0, SourcedDraft("slow", TOKENS, 0.9), num_accepted)
    return drafter.num_calls


def test_a_drafter_that_pays_is_asked_in_every_step():
    assert calls_in(Slow(0.010), 500, num_accepted=4) == 500


@pytest.mark.parametrize(("seconds", "num_accepted"), [(0.010, 0), (0.100, 4)])
def test_a_drafter_that_does_not_pay_takes_little_of_the_time(seconds, num_accepted):
    drafter = Slow(seconds)
    calls_in(drafter, 5000, num_accepted)
    assert drafter.num_calls > 16
    assert drafter.now - 16 * seconds < 0.2 * 5000 * 0.010 + 4 * seconds


@pytest.mark.parametrize(
    "calls_s",
    [
        [0.005],
        [0.005, 0.000_02],
        [0.100, 0.000_001, 0.000_001, 0.000_001],
        [0.001, 0.001, 0.001, 0.100],
        [0.050, *[0.000_02] * 7],
        [*[0.000_02] * 100, 0.500],
        [*[0.001] * 15, 3.0],
    ],
    ids=lambda calls_s: f"{len(calls_s)} calls with {max(calls_s)} s",
)
def test_the_share_is_kept_by_calls_of_different_length(calls_s):
    allowance, seconds, spent_s, num_steps, step_s = DraftAllowance(), cycle(calls_s), 0.0, 400_000, 0.010
    for _ in range(num_steps):
        if allowance.may_ask:
            call_s = next(seconds)
            allowance.spend(call_s)
            spent_s += call_s
        allowance.add_step(step_s)
    assert 0.015 < spent_s / (num_steps * step_s) < 0.025


def test_calls_that_compute_nothing_are_no_free_calls():
    allowance = DraftAllowance()
    allowance.add_step(0.010)
    for _ in range(100):
        allowance.spend(0.000_02)
        allowance.add_step(0.010)
    for _ in range(16):
        assert allowance.may_ask
        allowance.spend(0.005)
    allowance.spend(0.005)
    assert not allowance.may_ask


def test_a_cheap_drafter_is_always_asked():
    assert calls_in(Slow(0.100, is_expensive=False), 300, num_accepted=0) == 300


def test_a_device_without_times_limits_no_drafter():
    assert calls_in(Slow(0.100), 300, num_accepted=0, step_s=0.0) == 300


def test_one_long_call_does_not_stop_a_drafter_that_pays():
    allowance = DraftAllowance()
    for _ in range(100):
        allowance.spend(0.001)
        allowance.earn(0.002)
    allowance.spend(10.0)
    for _ in range(1000):
        assert allowance.may_ask
        allowance.spend(0.001)
        allowance.earn(0.002)
