"""The figures of a run are computed from hand-made records."""

from array import array
from dataclasses import replace

import pytest

from graftlm.bench.caveats import caveats
from graftlm.bench.lag import LagMonitor
from graftlm.bench.records import Failure, RequestRecord
from graftlm.bench.settings import BenchSettings
from graftlm.bench.summary import Distribution, summarize
from graftlm.bench.workload import Workload

#: Four requests, due at 0, 1, 2 and 3 s. The second one waited for 1 s in the client, the third one was refused, and
#: the
#: fourth one has no token counts.
RECORDS = [
    RequestRecord(
        index=0,
        asked_tokens=5,
        scheduled_s=0.0,
        sent_s=0.0,
        end_s=3.0,
        ttft_s=1.0,
        last_token_s=3.0,
        e2e_s=3.0,
        tpot_s=0.5,
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens=5,
        num_chunks=3,
        gaps_s=[0.5, 1.5],
        finish_reason="length",
    ),
    RequestRecord(
        index=1,
        asked_tokens=5,
        scheduled_s=1.0,
        sent_s=2.0,
        end_s=4.0,
        ttft_s=1.5,
        last_token_s=2.0,
        e2e_s=2.0,
        tpot_s=0.25,
        prompt_tokens=30,
        cached_tokens=0,
        output_tokens=3,
        num_chunks=1,
        gaps_s=[],
        finish_reason="stop",
    ),
    RequestRecord(
        index=2,
        asked_tokens=5,
        scheduled_s=2.0,
        sent_s=2.0,
        end_s=2.5,
        failure=Failure("http 429", "the queue is full"),
    ),
    RequestRecord(
        index=3,
        asked_tokens=5,
        scheduled_s=3.0,
        sent_s=4.0,
        end_s=8.0,
        ttft_s=2.0,
        last_token_s=4.0,
        e2e_s=4.0,
        num_chunks=2,
        gaps_s=[2.5],
        finish_reason="length",
    ),
]


def settings(**fields):
    return BenchSettings(url="http://x", **({"request_rate": 1.5, "percentiles": (50.0, 99.9)} | fields))


@pytest.fixture
def lag():
    monitor = LagMonitor()
    monitor.lags_s = array("d", [0.001, 0.003])
    monitor.cpu_share = 0.25
    return monitor


@pytest.fixture
def summary(lag):
    return summarize(RECORDS, settings(concurrency=2), lag)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "bounded"),
        ("duration_s", 8.0),
        ("requests", 4),
        ("completed", 3),
        ("failed", 1),
        ("finish_reasons", {"length": 2, "stop": 1}),
        ("asked_rate", 1.5),
        ("sent_rate", 0.75),
        ("completed_rate", 3 / 8),
        ("mean_in_flight", (3 + 2 + 0.5 + 4) / 8),
        ("max_in_flight", 3),
        ("requests_without_usage", 1),
        ("prompt_tokens", 40),
        ("cached_tokens", 4),
        ("output_tokens", 8),
        ("prompt_tokens_per_s", 5.0),
        ("output_tokens_per_s", 1.0),
        ("total_tokens_per_s", 6.0),
        ("tokens_per_chunk", 2.0),
        ("client_cpu_share", 0.25),
    ],
)
def test_a_figure_has_the_expected_value(summary, name, value):
    assert getattr(summary, name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ttft_s", [1.0, 1.5, 2.0]),
        ("tpot_s", [0.25, 0.5]),
        ("gap_s", [0.5, 1.5, 2.5]),
        ("e2e_s", [2.0, 3.0, 4.0]),
        ("e2e_from_arrival_s", [3.0, 3.0, 5.0]),
        ("client_queue_s", [0.0, 0.0, 1.0, 1.0]),
        ("loop_lag_s", [0.001, 0.003]),
    ],
)
def test_a_distribution_has_the_expected_values(summary, name, values):
    spread = getattr(summary, name)
    mean = sum(values) / len(values)
    last, before = values[-1], values[-2]
    middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
    # The 99.9th percentile is 0.1 % of the way from the last value to the first, between the last value and its
    # neighbour.
    high = last - (len(values) - 1) * 0.001 * (last - before)
    expected = Distribution(
        count=len(values),
        mean=pytest.approx(mean),
        stddev=pytest.approx((sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5),
        min=values[0],
        max=last,
        percentiles={"50": pytest.approx(middle), "99.9": pytest.approx(high)},
    )
    assert spread == expected


def test_failures_are_counted_by_kind_with_the_first_message(lag):
    kinds = ["timeout", "http 500", "timeout", "timeout"]
    records = [replace(RECORDS[2], failure=Failure(kind, f"{kind} {i}")) for i, kind in enumerate(kinds)]
    summary = summarize(records, settings(), lag)
    assert [(f.kind, f.count, f.example) for f in summary.failures] == [
        ("timeout", 3, "timeout 0"),
        ("http 500", 1, "http 500 1"),
    ]
    assert (summary.completed, summary.ttft_s, summary.gap_s, summary.cached_tokens) == (0, None, None, None)


def test_a_closed_loop_has_no_times_since_arrival(lag):
    records = [replace(record, scheduled_s=None) for record in RECORDS]
    summary = summarize(records, settings(request_rate=None, concurrency=2), lag)
    assert summary.mode == "closed"
    assert (summary.asked_rate, summary.sent_rate) == (None, None)
    assert (summary.client_queue_s, summary.e2e_from_arrival_s) == (None, None)


def test_a_request_that_ends_as_the_next_is_sent_is_not_concurrent_with_it(lag):
    records = [replace(RECORDS[2], sent_s=float(i), end_s=float(i + 1)) for i in range(4)]
    summary = summarize(records, settings(), lag)
    assert (summary.max_in_flight, summary.mean_in_flight) == (1, 1.0)


GOOD = {
    "failed": 0,
    "requests_without_usage": 0,
    "finish_reasons": {"length": 4},
    "sent_rate": 1.5,
    "cached_tokens": 0,
}
SLOW_LOOP = Distribution(2, 0.02, 0.01, 0.0, 0.08, {"50": 0.001, "99.9": 0.08})


@pytest.mark.parametrize(
    ("fields", "workload", "warning"),
    [
        ({}, {}, None),
        ({"loop_lag_s": SLOW_LOOP}, {}, "was too slow: its event loop ran up to 80 ms late"),
        ({"client_cpu_share": 0.97}, {}, "used 97% of a core"),
        ({"sent_rate": 0.5}, {}, "sent at 0.50/s instead of the requested 1.50/s: --concurrency delayed"),
        ({"failed": 1}, {}, "1 of 4 requests failed"),
        ({"requests_without_usage": 2}, {}, "2 answers had no token counts"),
        ({"finish_reasons": {"stop": 3}}, {}, "3 answers stopped early despite --ignore-eos"),
        ({}, {"num_repeated": 5}, "5 requests repeat lines of the dataset"),
        ({"cached_tokens": 20}, {"shared_share": 0.25}, "50% of the prompt tokens were cached, but shared prefixes"),
        ({"cached_tokens": 10}, {"shared_share": 0.25}, None),
    ],
)
def test_misleading_conditions_cause_warnings(summary, fields, workload, warning):
    found = caveats(settings(concurrency=2), Workload([], [], **workload), replace(summary, **(GOOD | fields)))
    if warning is None:
        assert found == []
    else:
        (text,) = found
        assert warning in text
