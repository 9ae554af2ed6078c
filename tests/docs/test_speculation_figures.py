"""The figures of docs/speculation.md equal those that the benchmark saved."""

import json

import pytest

from .pages import DOCS, ROOT

PAGE = (DOCS / "speculation.md").read_text(encoding="utf-8")
CASES = json.loads((ROOT / "benchmarks" / "results" / "speculation.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("name", CASES)
def test_the_page_has_the_saved_figures(name):
    case = CASES[name]
    low, high = min(case["ratios"]), max(case["ratios"])
    speeds = f"{case['plain_tokens_per_s']} | {case['drafts_tokens_per_s']}"
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    assert row.endswith(f"| {speeds} | {case['ratio']:.2f} ({low:.2f} to {high:.2f}) |")
