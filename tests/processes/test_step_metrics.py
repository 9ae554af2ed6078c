"""Histograms of a scheduler process in its reports."""

import pytest

from graftlm.processes import messages as m
from graftlm.processes.step_metrics import STEP_BUCKETS_S, STEP_HISTOGRAMS, Histogram, StepMetrics
from graftlm.records import EngineStats, StateStats, StepRecord, TierStats


def record(host_s, model_s):
    counts = {name: 1 for name in StepRecord.__dataclass_fields__ if name not in ("host_s", "model_s")}
    return StepRecord(**counts, host_s=host_s, model_s=model_s)


@pytest.mark.parametrize(
    ("value", "bucket"),
    [(0.0, 0), (0.5, 0), (1.0, 0), (1.001, 1), (2.0, 1), (4.0, 2), (4.1, 3), (1e9, 3)],
)
def test_a_value_counts_in_the_first_bucket_with_a_bound_not_below_it(value, bucket):
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.observe(value)
    counts, total = histogram.snapshot()
    assert [i for i, count in enumerate(counts) if count] == [bucket]
    assert total == value


def test_a_snapshot_does_not_change_afterwards():
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    before = histogram.snapshot()
    histogram.observe(0.25)
    assert before == ([1, 0], 0.5)
    assert histogram.snapshot() == ([2, 0], 0.75)


def test_steps_are_counted_by_host_time_and_by_model_time():
    metrics = StepMetrics()
    for host_s, model_s in [(0.0002, 0.004), (0.0002, 0.03), (0.0007, 60.0)]:
        metrics.observe(record(host_s, model_s))
    histograms = metrics.snapshot()
    assert set(histograms) == set(STEP_HISTOGRAMS)
    counts, total = histograms["step_host_seconds"]
    assert {STEP_BUCKETS_S[i]: count for i, count in enumerate(counts) if count} == {0.00025: 2, 0.001: 1}
    assert total == pytest.approx(0.0011)
    counts, total = histograms["step_model_seconds"]
    assert sum(counts) == 3
    assert counts[-1] == 1  # longer than every bound
    assert total == pytest.approx(60.034)


def test_the_bounds_increase():
    assert list(STEP_BUCKETS_S) == sorted(set(STEP_BUCKETS_S))


def test_histograms_are_unchanged_after_encoding_and_decoding():
    metrics = StepMetrics()
    metrics.observe(record(0.001, 0.002))
    stats = EngineStats(
        **dict.fromkeys(EngineStats.__dataclass_fields__, 1)
        | {"tiers": TierStats(1), "states": StateStats(1, 1, 1, 1, 1), "drafts": {"suffix": (1, 1)}}
    )
    load = m.Load(process="scheduler-0", stats=stats, histograms=metrics.snapshot())
    assert m.decode(m.encode(load)).histograms == metrics.snapshot()
