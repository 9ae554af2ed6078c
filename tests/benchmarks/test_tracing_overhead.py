"""The benchmark of traces runs, reports its figures, and fails above its limit."""

import importlib.util
import json
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "tracing_overhead.py"


@pytest.fixture(scope="module")
def overhead():
    spec = importlib.util.spec_from_file_location("benchmarks_tracing_overhead", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize(("limit", "status"), [("1000", 0), ("0", 1)])
def test_both_servers_are_measured_and_the_limit_decides_the_status(overhead, tmp_path, limit, status):
    path = tmp_path / "new" / "out.json"
    assert overhead.main(["--rounds", "2", "--requests", "4", "--json", str(path), "--max-ratio", limit]) == status
    wall, cpu = json.loads(path.read_text())["rows"]
    assert (wall["figure"], cpu["figure"]) == ("wall time, s", "CPU time, s")
    for row in (wall, cpu):
        assert len(row["untraced_rounds"]) == len(row["traced_rounds"]) == 2
        assert min(row["untraced_rounds"] + row["traced_rounds"]) > 0


def test_medians_are_over_rounds_and_ratios_over_pairs(overhead):
    row = overhead.Ratio.of("f", [1.0, 2.0, 10.0], [2.0, 3.0, 11.0])
    assert (row.untraced, row.traced, row.ratio) == (2.0, 3.0, 1.5)
    assert (row.ratio_min, row.ratio_max) == (1.1, 2.0)
