"""Names, labels and sums of /metrics; docs/metrics.md lists every metric."""

import re
from pathlib import Path

import pytest
import requests
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from graftlm.outputs import GatheredOutput
from graftlm.processes.messages import Load
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.step_metrics import StepMetrics
from graftlm.records import EngineStats, StateStats, StepRecord, TierStats
from graftlm.scheduling import Failure
from graftlm.server.metrics import ServerMetrics
from graftlm.testing.server_process import wait_until
from graftlm.types import Completion, FinishReason, Timings, Usage

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
PLAIN = "text/plain;version=0.0.4"


def families(text):
    """Return name -> family, without the gauges with the creation time of a series."""
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in found.items() if not name.endswith("_created")}


def samples(metrics):
    """Return (name, labels) -> value."""
    text = metrics.exposition(PLAIN)[0].decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(text).values()
        for sample in family.samples
    }


def report(name, **values):
    """Return a replica's report: two steps, the given values, and zero elsewhere."""
    stats = EngineStats(
        **dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        | {"eviction_age_s": None, "tiers": None, "states": None, "drafts": {}}
        | values
    )
    steps = StepMetrics()
    counts = {field: 0 for field in StepRecord.__dataclass_fields__ if field not in ("host_s", "model_s")}
    steps.observe(StepRecord(**counts, host_s=0.0002, model_s=0.02))
    steps.observe(StepRecord(**counts, host_s=0.0002, model_s=99.0))
    return Load(process=name, stats=stats, histograms=steps.snapshot())


def ended(queue_s=0.25):
    completion = Completion(index=0, text="", token_ids=(1,), finish_reason=FinishReason.STOP)
    timings = Timings(queue_s=queue_s, first_token_s=0.5, total_s=1.0)
    return GatheredOutput((completion,), Usage(1, 1, 0), timings)


@pytest.fixture
def replicas():
    return ReplicaSet(["scheduler-0", "scheduler-1"], can_recover=True)


@pytest.fixture
def metrics(replicas):
    metrics = ServerMetrics()
    metrics.watch(replicas)
    return metrics


def test_stored_states_are_shown_if_the_model_has_states(metrics, replicas):
    assert not any("state" in name and "states" in name for name, _ in samples(metrics))
    states = StateStats(num_snapshots=10, num_stored=6, num_free=1, num_stores=20, num_evicted=5)
    replicas.replicas[0].load = report("scheduler-0", states=states)
    found, replica = samples(metrics), ("replica", "scheduler-0")
    slots = {use: found["graftlm_state_slots", (replica, ("use", use))] for use in ("stored", "free", "running")}
    assert slots == {"stored": 6, "free": 1, "running": 3}
    assert found["graftlm_stored_states_total", (replica,)] == 20
    assert found["graftlm_evicted_states_total", (replica,)] == 5


def test_a_replicas_metrics_are_labelled_with_its_name(metrics, replicas):
    replicas.started("scheduler-0")
    replicas.replicas[0].load = report("scheduler-0", prompt_tokens=100, cached_tokens=40, running_requests=3)
    replicas.replicas[1].load = report("scheduler-1", prompt_tokens=7, evictable_pages=9, eviction_age_s=1.5)
    found = samples(metrics)
    first, second = ("replica", "scheduler-0"), ("replica", "scheduler-1")
    assert found["graftlm_prompt_tokens_total", (first,)] == 100
    assert found["graftlm_prompt_tokens_total", (second,)] == 7
    assert found["graftlm_cached_tokens_total", (first, ("tier", "device"))] == 40
    assert found["graftlm_running_requests", (first,)] == 3
    assert found["graftlm_kv_pages", (second, ("state", "evictable"))] == 9
    assert found["graftlm_replica_up", (first,)] == 1
    assert found["graftlm_replica_up", (second,)] == 0
    assert ("graftlm_eviction_age_seconds", (first,)) not in found
    assert found["graftlm_eviction_age_seconds", (second,)] == 1.5


def test_cached_tokens_and_blocks_are_reported_by_tier(metrics, replicas):
    tiers = TierStats(host_used_blocks=5, host_blocks=8, loaded_blocks=3, storage_blocks=7, storage_corrupt=2)
    replicas.replicas[0].load = report(
        "scheduler-0", cached_tokens=100, cached_host_tokens=30, cached_storage_tokens=20, tiers=tiers
    )
    found = samples(metrics)
    replica = ("replica", "scheduler-0")
    for tier, tokens in (("device", 50), ("host", 30), ("storage", 20)):
        assert found["graftlm_cached_tokens_total", (replica, ("tier", tier))] == tokens
    assert found["graftlm_tier_blocks", (replica, ("tier", "host"))] == 5
    assert found["graftlm_tier_blocks", (replica, ("tier", "storage"))] == 7
    assert found["graftlm_host_capacity_blocks", (replica,)] == 8
    assert found["graftlm_host_events_total", (("event", "loaded"), replica)] == 3
    assert found["graftlm_storage_events_total", (("event", "corrupt"), replica)] == 2


def test_a_dead_replica_reports_nothing_and_its_successor_counts_from_its_own_start(metrics, replicas):
    key = ("graftlm_generated_tokens_total", (("replica", "scheduler-0"),))
    replicas.replicas[0].load = report("scheduler-0", generated_tokens=50)
    assert samples(metrics)[key] == 50
    replicas.died("scheduler-0", "killed")
    assert key not in samples(metrics)
    replicas.replicas[0].load = report("scheduler-0", generated_tokens=2)
    assert samples(metrics)[key] == 2


def test_drafts_are_counted_by_replica_and_drafter(metrics, replicas):
    replicas.replicas[0].load = report("scheduler-0", drafts={"radix": (90, 80), "suffix": (20, 5)})
    replicas.replicas[1].load = report("scheduler-1", drafts={"radix": (0, 0), "suffix": (7, 7)})
    found = samples(metrics)
    drafts = {key: value for key, value in found.items() if "draft" in key[0] and not key[0].endswith("_created")}
    assert drafts == {
        (f"graftlm_{name}_total", (("drafter", drafter), ("replica", replica))): value
        for name, replica, drafter, value in [
            ("drafted_tokens", "scheduler-0", "radix", 90),
            ("drafted_tokens", "scheduler-0", "suffix", 20),
            ("drafted_tokens", "scheduler-1", "radix", 0),
            ("drafted_tokens", "scheduler-1", "suffix", 7),
            ("accepted_draft_tokens", "scheduler-0", "radix", 80),
            ("accepted_draft_tokens", "scheduler-0", "suffix", 5),
            ("accepted_draft_tokens", "scheduler-1", "radix", 0),
            ("accepted_draft_tokens", "scheduler-1", "suffix", 7),
        ]
    }


def test_without_speculation_there_are_no_series_of_drafts(metrics, replicas):
    replicas.replicas[0].load = report("scheduler-0", steps=2)
    assert not [name for name, _ in samples(metrics) if "draft" in name]


def test_a_replicas_histogram_is_cumulative(metrics, replicas):
    replicas.replicas[0].load = report("scheduler-0")
    found = samples(metrics)

    def bucket(bound):
        return found["graftlm_step_model_seconds_bucket", (("le", bound), ("replica", "scheduler-0"))]

    assert [bucket(bound) for bound in ("0.01", "0.025", "10.0", "+Inf")] == [0, 1, 1, 2]
    assert found["graftlm_step_model_seconds_count", (("replica", "scheduler-0"),)] == 2
    assert found["graftlm_step_model_seconds_sum", (("replica", "scheduler-0"),)] == pytest.approx(99.02)


def test_tokens_sent_together_share_their_time(metrics):
    metrics.more_tokens(0.04, 4)
    metrics.more_tokens(0.3, 1)
    found = samples(metrics)
    assert found["graftlm_inter_token_seconds_count", ()] == 5
    assert found["graftlm_inter_token_seconds_bucket", (("le", "0.01"),)] == 4
    assert found["graftlm_inter_token_seconds_sum", ()] == pytest.approx(0.34)


REASONS = ["stop", "length", "abort", *(failure.value for failure in Failure), "rejected", "unavailable"]


@pytest.mark.parametrize("outcome", REASONS)
def test_requests_are_counted_by_outcome(metrics, outcome):
    metrics.finished(ended(), 2.0, outcome)
    found = samples(metrics)
    assert found["graftlm_requests_finished_total", (("reason", outcome),)] == 1
    assert found["graftlm_request_seconds_sum", ()] == 2.0
    assert found["graftlm_queue_seconds_sum", ()] == 0.25


def test_a_request_that_was_never_admitted_has_no_queue_time(metrics):
    metrics.finished(ended(queue_s=None), 2.0, "rejected")
    assert samples(metrics)["graftlm_queue_seconds_count", ()] == 0


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        (PLAIN, False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", True),
        ("application/openmetrics-text; version=x", True),
    ],
)
def test_the_format_is_the_requested_one(metrics, replicas, accept, is_openmetrics):
    replicas.replicas[0].load = report("scheduler-0", steps=2)
    body, content_type = metrics.exposition(accept)
    assert content_type.startswith("application/openmetrics-text" if is_openmetrics else "text/plain")
    parsed = parse_openmetrics(body.decode()) if is_openmetrics else text_string_to_metric_families(body.decode())
    assert "graftlm_steps" in {family.name for family in parsed}


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other(metrics, replicas):
    parts = {"tiers": TierStats(), "states": StateStats(3, 1, 1, 1, 0), "drafts": {"suffix": (5, 3)}}
    replicas.replicas[0].load = report("scheduler-0", eviction_age_s=1.0, **parts)
    metrics.finished(ended(), 1.0, "stop")
    expected = set()
    for family in families(metrics.exposition(PLAIN)[0].decode()).values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        expected.add((name, family.type, ", ".join(sorted(labels))))
    documented = re.findall(r"^\| `(graftlm_\w+)` \| (\w+) \| ([\w, ]*?) *\|", PAGE, re.MULTILINE)
    assert set(documented) == expected
    assert len(documented) == len(expected)


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_documented(reason):
    assert f"`{reason}`" in PAGE.split("### Reasons")[1].split("##")[0]


def scrape(server):
    answer = requests.get(server.url + "/metrics", timeout=10)
    assert answer.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(answer.text).values()
        for sample in family.samples
    }


def test_the_numbers_of_a_server_add_up(server):
    replica = ("replica", "scheduler-0")
    before = scrape(server)
    body = {"prompt": "One, two, three, four, five, six,", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    body["cache_salt"] = "metrics"
    usages = [requests.post(server.url + "/v1/completions", json=body, timeout=30).json()["usage"] for _ in range(2)]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    expected = {
        ("graftlm_prompt_tokens_total", (replica,)): sum(usage["prompt_tokens"] for usage in usages),
        ("graftlm_cached_tokens_total", (replica, ("tier", "device"))): cached,
        ("graftlm_generated_tokens_total", (replica,)): 10,
        ("graftlm_requests_finished_total", (("reason", "length"),)): 2,
        ("graftlm_time_to_first_token_seconds_count", ()): 2,
        ("graftlm_inter_token_seconds_count", ()): 8,
        ("graftlm_request_seconds_count", ()): 2,
        ("graftlm_queue_seconds_count", ()): 2,
    }

    def growth():
        now = scrape(server)
        return {key: now[key] - before.get(key, 0) for key in expected}

    # The scheduler reports when it becomes idle, a moment after the answer.
    wait_until(lambda: growth() == expected, 10, "the growth of the counters")
    after = scrape(server)
    steps = after["graftlm_steps_total", (replica,)]
    assert after["graftlm_step_model_seconds_count", (replica,)] == steps > 0
    pages = [after["graftlm_kv_pages", (replica, ("state", s))] for s in ("free", "evictable", "locked", "owned")]
    assert sum(pages) == 32768


def test_a_server_answers_openmetrics_on_request(server):
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = requests.get(server.url + "/metrics", headers=headers, timeout=10)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "graftlm_replica_up" in {family.name for family in parse_openmetrics(answer.text)}


def test_an_early_disconnect_is_counted_and_frees_everything(server):
    running = ("graftlm_running_requests", (("replica", "scheduler-0"),))
    aborted = ("graftlm_requests_finished_total", (("reason", "abort"),))
    locked, owned = (
        ("graftlm_kv_pages", (("replica", "scheduler-0"), ("state", state))) for state in ("locked", "owned")
    )
    before = scrape(server).get(aborted, 0)
    body = {"prompt": "One, two,", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with requests.post(server.url + "/v1/completions", json=body, stream=True, timeout=30) as answer:
        lines = answer.iter_lines()  # with a name, since the connection is closed when the iterator is freed
        assert next(lines).startswith(b"data:")
        wait_until(lambda: scrape(server)[running] == 1, 10, "the running request")
    wait_until(lambda: scrape(server).get(aborted, 0) == before + 1, 10, "the aborted request")
    wait_until(lambda: [scrape(server)[key] for key in (running, locked, owned)] == [0, 0, 0], 10, "an idle server")
