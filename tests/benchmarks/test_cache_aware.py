"""A small simulation of cache-aware policies confirms the claims about `lpm`, and its figures are right."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from graftlm.testing.fake_device import expected_output

SOURCE = Path(__file__).parents[2] / "benchmarks" / "cache_aware.py"
WORKLOADS = ["few-shot", "tree-of-thought", "multi-turn"]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("benchmarks_cache_aware", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations in sys.modules
    yield (spec.loader.exec_module(module), module)[1]
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def report(bench, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "new" / "out.json"
    bench.main(
        [
            "--scale",
            "0.1",
            "--seeds",
            "1",
            "--memory",
            "0.5",
            "--rows",
            "4",
            "--policies",
            "lpm",
            "fcfs",
            "--json",
            str(path),
        ]
    )
    return json.loads(path.read_text())


def row_of(report, workload, policy):
    (row,) = [r for r in report["rows"] if (r["workload"], r["policy"]) == (workload, policy)]
    return row


@pytest.mark.parametrize("workload", WORKLOADS)
def test_lpm_is_near_the_optimum_and_aged_requests_keep_their_order(report, workload):
    lpm, fcfs = row_of(report, workload, "lpm"), row_of(report, workload, "fcfs")
    assert 0.98 <= lpm["share_of_optimum"] <= 1
    assert fcfs["share_of_optimum"] <= lpm["share_of_optimum"]
    assert lpm["out_of_turn"] == 0


def test_the_settings_are_saved(report):
    assert report["settings"] == {
        "seeds": 1,
        "scale": 0.1,
        "page_size": 1,
        "rows": 4,
        "max_wait_s": 60.0,
        "memory": [0.5],
    }


def distinct_prompt_tokens(requests):
    """Count the distinct prompt tokens, in order of arrival and without a tree."""
    seen, num_tokens = set(), 0
    for request in requests:
        ids = request.token_ids.tolist()
        prefixes = [tuple(ids[:end]) for end in range(1, len(ids))]  # the last token is never computed
        reusable = prefixes[: request.prompt_len - 1]
        num_tokens += request.prompt_len - sum(prefix in seen for prefix in reusable)
        seen.update(prefixes)
    return num_tokens


@pytest.mark.parametrize("workload", WORKLOADS)
def test_with_memory_for_everything_each_distinct_token_is_computed_once(bench, workload):
    calls = bench.WORKLOADS[workload](bench.Draw(0), 0.03)
    simulation = bench.Simulation(calls, bench.count_tokens(calls, 0), bench.create("fcfs", 0, 60.0))
    outcome = simulation.run()
    requests = sorted(simulation.finished, key=lambda request: request.finished_s)
    assert simulation.num_computed == distinct_prompt_tokens(requests)
    rate, _ = bench.optimum(simulation.finished, page_size=1)
    assert rate == pytest.approx(outcome.hit_rate)
    for request in requests[:20]:
        expected = expected_output(request.prompt_token_ids.tolist(), request.max_new_tokens, bench.VOCAB_SIZE)
        assert request.output_token_ids.tolist() == expected


def test_aged_requests_are_admitted_in_order(bench):
    """With a bound near zero many requests age, and earlier arrivals are still admitted first."""
    calls = bench.few_shot(bench.Draw(0), 0.1)
    outcome = bench.Simulation(calls, 4000, bench.create("lpm", 0, 0.05)).run()
    assert outcome.aged > 20
    assert outcome.late_s > 0
    assert outcome.out_of_turn == 0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_fixes_the_workload(bench, workload):
    one, other, third = (bench.WORKLOADS[workload](bench.Draw(seed), 0.05) for seed in (0, 0, 1))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0].tokens, third[0].tokens)
