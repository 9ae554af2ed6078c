"""The benchmark of long prompts runs, and reports every kind of request."""

import importlib.util
import json
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "benchmarks" / "long_prompts.py"


def test_each_kind_of_request_has_its_figures(tmp_path):
    spec = importlib.util.spec_from_file_location("benchmarks_long_prompts", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--tokens", "300", "--rounds", "1", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["workload"] for row in rows] == ["text", "chat", "ids"]
    for row in rows:
        assert 280 <= row["prompt_tokens"] <= 320
        assert row["loop_cpu_ms"] > 0
        assert 0 < row["intake_ms"] < row["total_ms"]
