"""Metrics under the names of vLLM and SGLang: the same values as graftlm's own, on a server with real traffic."""

import re
from pathlib import Path

import pytest
import requests
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from graftlm.outputs import GatheredOutput
from graftlm.server.metrics_aliases import AliasSource, add_aliases
from graftlm.testing.server_process import wait_until
from graftlm.types import Completion, FinishReason, Timings, Usage

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Names of vLLM and SGLang")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (.*?) ?\| (.*?) ?\| (\w+) \| (.+) \|$", SECTION, re.MULTILINE)
DOCUMENTED = {cell.strip("` "): kind for *cells, kind, _ in ROWS for cell in cells if cell.startswith("`")}
#: Only while tokens are drafted.
RECENT = {"sglang:spec_accept_length", "sglang:spec_accept_rate"}
LABELS = {
    "vllm": {("model_name", "demo"), ("engine", "0")},
    "sglang": {("model_name", "demo"), ("dp_rank", "0")},
}


def scrape(server):
    """Return name -> family, without the gauges with the creation time of a series."""
    text = requests.get(server.url + "/metrics", timeout=10).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in families.items() if not name.endswith("_created")}


def exposed(family):
    return f"{family.name}_total" if family.type == "counter" else family.name


def total(families, name, **labels):
    """Return the sum of the samples of a name that have these labels."""
    family = families[re.sub("_(total|sum|count)$", "", name)]
    samples = [sample for sample in family.samples if sample.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


def complete(server, **fields):
    body = {"prompt": "Once there was", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    answer = requests.post(server.url + "/v1/completions", json=body | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def families(drafting_server):
    """All families, after traffic of every kind and while the server is idle."""
    for fields in ({}, {}, {}, {"n": 2, "seed": 1}, {"choice": ["yes", "no"]}, {"choice": ["yes", "no"]}):
        complete(drafting_server, **fields)
    body = {"prompt": "One, two,", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with requests.post(drafting_server.url + "/v1/completions", json=body, stream=True, timeout=60) as answer:
        lines = answer.iter_lines()  # with a name, since the connection is closed when the iterator is freed
        assert next(lines).startswith(b"data:")

    def settled():
        found = scrape(drafting_server)
        ended = total(found, "graftlm_requests_finished_total", reason="abort")
        return ended == 1 and total(found, "graftlm_running_requests") == 0 and set(found) >= RECENT

    wait_until(settled, 30, "an idle server")
    return scrape(drafting_server)


def pages(families, *states):
    return sum(total(families, "graftlm_kv_pages", state=state) for state in states)


def finished(families, *reasons):
    return sum(total(families, "graftlm_requests_finished_total", reason=reason) for reason in reasons)


def drafts(families, name):
    return total(families, f"graftlm_{name}_total")


#: Aliases -> their value by graftlm's own metrics.
VALUES = {
    ("vllm:num_requests_running", "sglang:num_running_reqs"): lambda f: total(f, "graftlm_running_requests"),
    ("vllm:num_requests_waiting", "sglang:num_queue_reqs"): lambda f: total(f, "graftlm_queued_requests"),
    ("vllm:kv_cache_usage_perc", "sglang:token_usage"): lambda f: pages(f, "locked", "owned") / 2048,
    ("sglang:num_used_tokens",): lambda f: pages(f, "locked", "owned") * 4,
    ("sglang:max_total_num_tokens",): lambda f: pages(f, "free", "evictable", "locked", "owned") * 4,
    (
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_queries_total",
        "sglang:prompt_tokens_total",
    ): lambda f: total(f, "graftlm_prompt_tokens_total"),
    (
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_hits_total",
        "sglang:cached_tokens_total",
    ): lambda f: total(f, "graftlm_cached_tokens_total"),
    ("vllm:generation_tokens_total", "sglang:generation_tokens_total"): lambda f: total(
        f, "graftlm_generated_tokens_total"
    ),
    ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"): lambda f: total(
        f, "graftlm_retractions_total"
    ),
    ("vllm:spec_decode_num_draft_tokens_total",): lambda f: drafts(f, "drafted_tokens"),
    ("vllm:spec_decode_num_accepted_tokens_total",): lambda f: drafts(f, "accepted_draft_tokens"),
    ("sglang:num_grammar_total",): lambda f: (
        total(f, "graftlm_grammar_hits_total") + total(f, "graftlm_grammar_misses_total")
    ),
    ("sglang:num_grammar_cache_hit_total",): lambda f: total(f, "graftlm_grammar_hits_total"),
    ("vllm:request_success_total", "sglang:num_requests_total"): lambda f: total(f, "graftlm_requests_finished_total"),
    ("sglang:num_aborted_requests_total",): lambda f: finished(f, "abort"),
}
HISTOGRAMS = {
    "graftlm_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "graftlm_inter_token_seconds": ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "graftlm_request_seconds": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "graftlm_queue_seconds": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
}


@pytest.mark.parametrize("alias", [alias for names in VALUES for alias in names])
def test_an_alias_has_the_value_of_our_metric(families, alias):
    (value,) = [value for names, value in VALUES.items() if alias in names]
    assert total(families, alias) == pytest.approx(value(families))


@pytest.mark.parametrize(("ours", "alias"), [(ours, alias) for ours, names in HISTOGRAMS.items() for alias in names])
def test_a_latency_has_the_same_count_and_sum_in_other_buckets(families, ours, alias):
    assert total(families, f"{alias}_count") == total(families, f"{ours}_count") > 0
    assert total(families, f"{alias}_sum") == pytest.approx(total(families, f"{ours}_sum"))
    buckets = [sample.value for sample in families[alias].samples if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == total(families, f"{alias}_count")
    # A bound that both have separates the same observations.
    bounds = [
        {s.labels["le"]: s.value for s in families[name].samples if s.name.endswith("_bucket")}
        for name in (ours, alias)
    ]
    shared = bounds[0].keys() & bounds[1].keys()
    assert len(shared) > 3
    assert {le: bounds[0][le] for le in shared} == {le: bounds[1][le] for le in shared}


def test_the_parts_of_a_request_add_up(families):
    def seconds(part):
        return total(families, f"vllm:request_{part}_time_seconds_sum")

    assert seconds("inference") == pytest.approx(seconds("prefill") + seconds("decode"))
    assert total(families, "vllm:request_inference_time_seconds_count") >= 5


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_series_of_a_replica_have_the_labels_of_the_other_server(families, server):
    for name, family in families.items():
        if name.startswith(server):
            for sample in family.samples:
                labels = {key: value for key, value in sample.labels.items() if key not in ("le", "finished_reason")}
                assert labels["model_name"] == "demo"
                assert set(labels.items()) <= LABELS[server]
    (running,) = families[{"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}[server]].samples
    assert set(running.labels.items()) == LABELS[server]


def test_rates_of_the_last_seconds_are_plausible(families):
    assert 0 < total(families, "sglang:cache_hit_rate") <= 1
    assert 0 <= total(families, "sglang:spec_accept_rate") <= 1
    assert total(families, "sglang:spec_accept_length") >= 1
    assert total(families, "sglang:gen_throughput") >= 0


def test_every_alias_is_documented_with_its_type_and_no_other(families):
    found = {exposed(f): f.type for f in families.values() if f.name.startswith(("vllm:", "sglang:"))}
    assert found == DOCUMENTED


def test_the_table_of_values_covers_every_alias_without_a_definition_of_its_own():
    ours = {cell.strip("` ") for *cells, _, value in ROWS for cell in cells if "graftlm_" in value and cell}
    assert ours <= {name for names in VALUES for name in names} | {n for names in HISTOGRAMS.values() for n in names}


def test_openmetrics_has_the_aliases_too(drafting_server):
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    text = requests.get(drafting_server.url + "/metrics", headers=headers, timeout=10).text
    families = {family.name: family for family in parse_openmetrics(text)}
    assert {name for name, family in families.items() if family.type == "unknown"} == set()
    for name in ("vllm:num_requests_running", "sglang:prompt_tokens"):
        assert families[name].samples[0].labels["model_name"] == "demo"


def test_without_the_setting_there_are_no_aliases(server):
    assert not [name for name in scrape(server) if ":" in name]


def ended(num_tokens=3):
    completion = Completion(index=0, text="", token_ids=(1,) * num_tokens, finish_reason=FinishReason.STOP)
    return GatheredOutput((completion,), Usage(7, num_tokens, 0), Timings(queue_s=0.25, first_token_s=0.5, total_s=1.5))


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    source = AliasSource("m", context_len=120, page_size=1, replicas=(), latest=lambda: None)
    registry.parts = add_aliases(["vllm", "sglang", "vllm"], source, registry)
    return registry


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("engine", "error"), ("timeout", "error")],
)
def test_a_reason_is_translated_to_the_one_of_vllm(registry, outcome, reason):
    for part in registry.parts:
        part.finished(ended(), 2.0, outcome)
    labels = {"model_name": "m", "finished_reason": reason}
    assert registry.get_sample_value("vllm:request_success_total", labels) == 1
    assert registry.get_sample_value("sglang:num_requests_total", {"model_name": "m"}) == 1
    aborted = registry.get_sample_value("sglang:num_aborted_requests_total", {"model_name": "m"})
    assert aborted == (outcome == "abort")


def test_a_rejected_request_is_not_counted_as_ended(registry):
    for part in registry.parts:
        part.finished(ended(), 2.0, "rejected")
    assert registry.get_sample_value("sglang:num_requests_total", {"model_name": "m"}) == 0
    assert registry.get_sample_value("vllm:request_prompt_tokens_count", {"model_name": "m"}) == 0
    assert registry.get_sample_value("vllm:e2e_request_latency_seconds_count", {"model_name": "m"}) == 1


def test_times_and_sizes_of_one_request(registry):
    for part in registry.parts:
        part.finished(ended(), 2.0, "stop")
    expected = {
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 1.0,
        "request_inference_time_seconds": 1.25,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 3,
        "request_max_num_generation_tokens": 3,
    }
    found = {name: registry.get_sample_value(f"vllm:{name}_sum", {"model_name": "m"}) for name in expected}
    assert found == expected


def test_buckets_of_sizes_end_at_the_context(registry):
    family = next(f for f in registry.collect() if f.name == "vllm:request_prompt_tokens")
    bounds = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]
