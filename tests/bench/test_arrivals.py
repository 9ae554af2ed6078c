"""Arrivals follow the configured random process."""

import numpy as np
import pytest

from graftlm.bench.arrivals import arrival_times

NUM = 20_000


def draw(num, rate, burstiness, seed=0):
    return arrival_times(num, rate, burstiness, np.random.default_rng(seed))


@pytest.mark.parametrize("rate", [0.5, 8.0, 400.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gaps_have_the_mean_and_deviation_of_the_process(rate, burstiness):
    gaps = np.diff(draw(NUM, rate, burstiness))
    deviation = 1 / np.sqrt(burstiness)  # relative deviation of a gap
    assert gaps.mean() == pytest.approx(1 / rate)
    assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.1)


def test_counts_of_a_poisson_process_have_equal_mean_and_variance():
    arrivals = draw(NUM, 10.0, 1.0)
    counts = np.histogram(arrivals, bins=np.arange(0, arrivals[-1], 1.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)


def test_gaps_that_round_to_zero_cause_no_division_by_zero():
    assert draw(3, 1.0, 1e-9).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("num", [1, 2, 50])
def test_the_first_request_arrives_at_time_zero(num):
    arrivals = draw(num, 3.0, 0.5)
    assert arrivals.shape == (num,)
    assert arrivals[0] == 0
    assert (np.diff(arrivals) >= 0).all()


def test_a_seed_fixes_the_arrivals():
    assert draw(50, 3.0, 1.0, seed=1).tolist() == draw(50, 3.0, 1.0, seed=1).tolist()
    assert draw(50, 3.0, 1.0, seed=1).tolist() != draw(50, 3.0, 1.0, seed=2).tolist()
