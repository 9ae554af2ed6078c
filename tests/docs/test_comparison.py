"""The figures of docs/comparison.md equal those that the benchmarks saved."""

import json

import pytest

from .pages import DOCS, ROOT

PAGE = (DOCS / "comparison.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


def saved(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", saved("versus_transformers.json"), ids=lambda row: row["workload"])
def test_figures_of_other_engines_are_the_saved_ones(row):
    for engine, prefix in (("transformers", ""), ("vllm", "vllm_")):
        ratio, low, high = (row[f"{prefix}{name}"] for name in ("ratio", "ratio_min", "ratio_max"))
        speeds = f"{row[f'{engine}_tokens_per_s']:.1f} | {row['graftlm_tokens_per_s']:.1f}"
        assert f"| {row['workload']} | {speeds} | {ratio:.2f} ({low:.2f} to {high:.2f}) |" in PAGE


VARIANTS = {
    "no cache": "without a prefix cache",
    "no tree": "a table of whole prefixes for the radix tree",
    "FCFS": "first come, first served",
    "no parallelism": "one request of a program at a time",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_figures_of_each_part_are_the_saved_ones(variant):
    rows = {row["workload"]: row for row in saved("lang_ablation.json") if row["variant"] == variant}
    order = ("tree of thought", "LLM judge", "few-shot", "multi-turn")
    figures = " | ".join(f"{rows[name]['cpu_times_full']:.2f}" for name in order)
    assert f"| {VARIANTS[variant]} | {figures} |" in PAGE


def test_figures_of_the_server_are_the_saved_ones():
    rows = saved("server-overhead-demo.json")
    (row,) = [row for row in rows if row["workload"] == "32 streams"]
    assert f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}) of the tokens" in PAGE
    (row,) = [row for row in rows if (row["workload"], row["figure"]) == ("single stream", "first token, ms")]
    assert f"{row['difference']:.1f} ms later" in PAGE


@pytest.mark.parametrize(("cache", "name"), [("cold", "nothing cached"), ("warm", "after a `gen`")])
def test_figures_of_select_are_the_saved_ones(cache, name):
    rows = saved("lang_select.json")
    (row,) = [row for row in rows if (row["cache"], row["method"]) == (cache, "token_length_normalized")]
    spread = f"{row['time_ratio_min']:.1f} to {row['time_ratio_max']:.1f}"
    cpu = f"{row['cpu_ratio']:.1f} ({row['cpu_ratio_min']:.1f} to {row['cpu_ratio_max']:.1f})"
    cells = [
        name,
        f"{row['prefilled_recompute']:,.0f}",
        f"{row['prefilled_shared']:,.0f} ({row['prefilled_ratio']:.1f} times fewer)",
        f"{row['ms_recompute']:,.0f}",
        f"{row['ms_shared']:,.0f} ({row['time_ratio']:.1f} times faster; {spread})",
        cpu,
    ]
    assert f"| {' | '.join(cells)} |" in (DOCS / "lang.md").read_text(encoding="utf-8")
