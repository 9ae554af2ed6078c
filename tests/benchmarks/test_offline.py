"""The offline benchmark runs and reports what it says."""

import importlib.util
import json
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "offline.py"
WORKLOADS = ["shared-prefix", "multi-turn", "unshared", "single-stream"]


@pytest.fixture(scope="module")
def offline():
    spec = importlib.util.spec_from_file_location("benchmarks_offline", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(offline, checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "new" / "out.json"
    settings = ["--model", str(checkpoint("llama")), "--scale", "0.05", "--repeats", "1", "--seed", "3"]
    settings += ["--set", "memory.kv_tokens=8192", "--compare", "cache.name=chunk", "--json", str(path)]
    offline.main(settings)
    return json.loads(path.read_text())


def run_of(report, workload, variant="base"):
    (run,) = [r for r in report["runs"] if (r["workload"], r["variant"]) == (workload, variant)]
    return run


def test_the_machine_and_the_settings_are_noted(report):
    assert set(report["machine"]) == {"cpu", "cores", "gpu", "threads", "torch", "python", "graftlm"}
    assert report["machine"]["cpu"]
    assert (report["scale"], report["seed"], report["repeats"]) == (0.05, 3, 1)
    assert report["set"] == ["memory.kv_tokens=8192"]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("variant", ["base", "cache.name=chunk"])
def test_every_workload_runs_on_every_variant(report, offline, workload, variant):
    run = run_of(report, workload, variant)
    assert set(run) == set(offline.Run.__dataclass_fields__)
    assert run["output_tokens"] >= 2 * run["requests"]
    assert run["total_tokens_per_s"] > run["output_tokens_per_s"] > 0
    assert run["ttft_p99_ms"] >= run["ttft_p50_ms"] > 0
    assert run["tpot_p99_ms"] >= run["tpot_p50_ms"] > 0
    assert run["steps"] > 0
    assert run["host_ms_per_step"] > 0
    assert run["model_ms_per_step"] > 0
    assert run["retractions"] == 0


@pytest.mark.parametrize(
    ("workload", "requests", "shares"),
    [("shared-prefix", 3, True), ("multi-turn", 4, True), ("unshared", 2, False), ("single-stream", 1, False)],
)
def test_only_what_is_shared_comes_from_the_cache(report, workload, requests, shares):
    base, chunk = run_of(report, workload), run_of(report, workload, "cache.name=chunk")
    assert base["requests"] == chunk["requests"] == requests
    assert (base["cache_hit_rate"] > 0.5) == shares
    assert chunk["cache_hit_rate"] == 0


def test_prompts_follow_from_the_seed(offline):
    drawn = [offline.Prompts(512, seed).draw(20) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(("context_len", "longest"), [(4096, 1104), (1104, 1104), (552, 552), (100, 100)])
def test_lengths_fit_the_context(offline, context_len, longest):
    size = offline.Size.of(1.0, context_len)
    assert size.tokens(1024) + size.tokens(64) + size.tokens(16) <= longest
    assert 4 * (size.tokens(128) + size.tokens(64)) <= longest
