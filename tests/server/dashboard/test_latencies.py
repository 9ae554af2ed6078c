"""Percentiles of recent times."""

import random

import numpy as np
import pytest

from graftlm.server.dashboard.latencies import LatencyWindow


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.01, 0.5, 0.95, 1.0])
def test_a_percentile_is_within_three_percent_of_the_exact_one(seed, share):
    rng = random.Random(seed)
    times = [rng.lognormvariate(-4, 2) for _ in range(500)]
    window = LatencyWindow(3)
    for i, seconds in enumerate(times):
        window.observe(seconds)
        if i in (200, 400):
            window.end_interval()
    window.end_interval()
    exact = float(np.quantile(times, share, method="inverted_cdf"))
    assert window.percentiles(share) == (pytest.approx(exact, rel=0.03),)


def test_a_count_weighs_a_time():
    window = LatencyWindow(1)
    window.observe(0.01, count=9)
    window.observe(1.0)
    window.end_interval()
    assert window.percentiles(0.9, 0.95) == (pytest.approx(0.01, rel=0.03), pytest.approx(1.0, rel=0.03))


def test_only_complete_and_recent_intervals_count():
    window = LatencyWindow(2)
    window.observe(1.0)
    assert window.percentiles(0.5, 0.95) == (None, None)
    for _ in range(2):
        window.end_interval()
        assert window.percentiles(0.5) == (pytest.approx(1.0, rel=0.03),)
    window.end_interval()
    assert window.percentiles(0.5) == (None,)


@pytest.mark.parametrize("seconds", [0.0, -1e-9, 1e-9])
def test_a_time_of_zero_is_counted(seconds):
    window = LatencyWindow(1)
    window.observe(seconds)
    window.end_interval()
    assert 0 < window.percentiles(0.5)[0] < 1e-5
