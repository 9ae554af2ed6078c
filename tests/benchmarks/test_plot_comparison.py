"""The chart in the README shows the saved figures."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("plot_comparison", ROOT / "benchmarks" / "plot_comparison.py")
plot_comparison = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plot_comparison)

CHART = (ROOT / "docs" / "drawings" / "comparison.svg").read_text(encoding="utf-8")
SAVED = json.loads((ROOT / "benchmarks" / "results" / "versus_transformers.json").read_text(encoding="utf-8"))

ENGINES = ["graftlm", "transformers", *(["vllm"] if "vllm" in SAVED else [])]


@pytest.mark.parametrize("row", SAVED["rows"], ids=lambda row: row["workload"])
def test_each_workload_has_its_saved_rates_and_ratio(row):
    group = CHART.split(f">{row['workload']}</text>")[1]
    labels = re.findall(r'class="small">([\d.]+)(?: \(([\d.]+) times\))?</text>', group)
    expected = [(f"{row[f'{engine}_tokens_per_s']:.1f}", "") for engine in ENGINES]
    expected[0] = expected[0][0], f"{row['ratio']:.2f}"
    assert labels[: len(ENGINES)] == expected


def test_bars_are_proportional_to_the_saved_rates():
    bars = [float(width) for width in re.findall(r'width="([\d.]+)" height="16"', CHART)]
    rates = [row[f"{engine}_tokens_per_s"] for row in SAVED["rows"] for engine in ENGINES]
    assert bars == pytest.approx([rate * max(bars) / max(rates) for rate in rates], abs=0.1)


def test_the_committed_chart_is_what_the_script_draws():
    assert plot_comparison.drawn_from() == CHART


def test_a_third_engine_gets_a_bar_of_its_own():
    rows = [{"workload": "chat", "graftlm_tokens_per_s": 2.0, "other_tokens_per_s": 4.0, "third_tokens_per_s": 1.0}]
    svg = plot_comparison.chart(rows, "caption")
    assert [float(width) for width in re.findall(r'width="([\d.]+)" height="16"', svg)] == [180.0, 360.0, 90.0]
