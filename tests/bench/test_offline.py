"""`graftlm bench offline` runs its workloads and reports all figures."""

import json
from dataclasses import fields

import pytest

from graftlm.bench import BenchError
from graftlm.bench.offline import DEFAULT_WORKLOADS, Run
from graftlm.bench.offline.runs import measure
from graftlm.bench.offline.workloads import Prompts, Size
from graftlm.cli import main
from graftlm.engine.engine import Engine


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "new" / "out.json"
    arguments = ["--model", str(checkpoint("llama")), "--scale", "0.05", "--rounds", "1", "--seed", "3"]
    arguments += ["--set", "memory.kv_tokens=8192", "--compare", "cache.name=chunk", "--json", str(path)]
    with pytest.raises(SystemExit) as caught:
        main(["bench", "offline", *arguments])
    assert not caught.value.code
    return json.loads(path.read_text())


def run_of(saved, workload, variant="base"):
    (run,) = [r for r in saved["runs"] if (r["workload"], r["variant"]) == (workload, variant)]
    return run


def test_the_machine_and_the_settings_are_saved(saved, checkpoint):
    assert set(saved["machine"]) == {"cpu", "cores", "gpu", "threads", "torch", "python", "graftlm"}
    assert saved["machine"]["cpu"]
    assert (saved["scale"], saved["seed"], saved["rounds"]) == (0.05, 3, 1)
    assert saved["set"] == ["memory.kv_tokens=8192", f"model.path={checkpoint('llama')}"]


@pytest.mark.parametrize("workload", DEFAULT_WORKLOADS)
@pytest.mark.parametrize("variant", ["base", "cache.name=chunk"])
def test_every_workload_runs_on_every_variant(saved, workload, variant):
    run = run_of(saved, workload, variant)
    assert set(run) == {field.name for field in fields(Run)}
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
def test_only_shared_tokens_come_from_the_cache(saved, workload, requests, shares):
    base, chunk = run_of(saved, workload), run_of(saved, workload, "cache.name=chunk")
    assert base["requests"] == chunk["requests"] == requests
    assert (base["cache_hit_rate"] > 0.5) == shares
    assert chunk["cache_hit_rate"] == 0


class LateEngine(Engine):
    """Fails each request before its first token."""

    def generate(self, *args, **kwargs):
        return super().generate(*args, timeout_s=1e-9, **kwargs)


def test_a_request_without_a_token_is_an_error_with_its_reason(checkpoint):
    with (
        LateEngine(
            model=str(checkpoint("llama")),
            memory={"kv_tokens": 8192},
            scheduling={"prefill_tokens_per_step": 4},  # the prompt needs several steps
        ) as engine,
        pytest.raises(BenchError, match="ended without a token: timed out after"),
    ):
        measure(engine, "unshared", "base", 0.05, 1)


def test_prompts_depend_only_on_the_seed():
    drawn = [Prompts(512, seed).draw(20) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(("context_len", "longest"), [(4096, 1104), (1104, 1104), (552, 552), (100, 100)])
def test_lengths_fit_the_context(context_len, longest):
    size = Size.of(1.0, context_len)
    assert size.tokens(1024) + size.tokens(64) + size.tokens(16) <= longest
    assert 4 * (size.tokens(128) + size.tokens(64)) <= longest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["offline", "--workload", "unshard"],
            "--workload: there is no 'unshard'. Available: shared-prefix, multi-turn",
        ),
        (["ablation", "--off", "cash"], "--off: there is no 'cash'. Available: prefix_cache, overlap"),
        (
            ["roofline", "--batch", "1,x"],
            "--batch must be numbers above 0 separated by commas, such as 1,16, got '1,x'",
        ),
        (
            ["roofline", "--prefill", "0"],
            "--prefill must be numbers above 0 separated by commas, such as 1,16, got '0'",
        ),
        (["roofline", "--plot", "a.pdf"], "--plot writes PNG or SVG files, got a.pdf; name it a.png"),
        (["roofline", "--context", "5000", "--prefill", "2048"], "decode, batch 1, context 5,000: left out"),
    ],
)
def test_wrong_arguments_are_refused_before_an_engine_is_loaded(arguments, message, capfd):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert f"error: {message}" in capfd.readouterr().err
