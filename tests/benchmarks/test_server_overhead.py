"""The benchmark of the server's overhead runs and reports its figures."""

import importlib.util
import json
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "server_overhead.py"


@pytest.fixture(scope="module")
def overhead():
    spec = importlib.util.spec_from_file_location("benchmarks_server_overhead", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result(overhead, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "new" / "out.json"
    overhead.main(["--rounds", "1", "--scale", "0.1", "--json", str(path)])
    return json.loads(path.read_text())


@pytest.mark.full
@pytest.mark.parametrize(
    ("workload", "figure"),
    [
        ("single stream", "first token, ms"),
        ("single stream", "per later token, ms"),
        ("single stream", "end to end, ms"),
        ("3 streams", "output tokens/s"),
        ("single answer", "end to end, ms"),
        ("3 answers", "output tokens/s"),
    ],
)
def test_every_figure_has_an_engine_side_and_a_server_side(result, workload, figure):
    (row,) = [row for row in result["rows"] if (row["workload"], row["figure"]) == (workload, figure)]
    assert row["in_process"] > 0
    assert row["ratio"] == pytest.approx(row["served"] / row["in_process"])
    assert row["difference"] == pytest.approx(row["served"] - row["in_process"])
    assert (len(row["in_process_rounds"]), len(row["served_rounds"])) == (1, 1)


@pytest.mark.full
def test_the_server_generates_the_same_tokens_as_the_engine(result):
    assert result["same_tokens"] == result["compared"] == 2 * (1 + 3)


def test_medians_are_over_rounds_and_ratios_over_pairs(overhead):
    row = overhead.Row.of("w", "f", [1.0, 2.0, 10.0], [2.0, 3.0, 11.0])
    assert (row.in_process, row.served, row.ratio, row.difference) == (2.0, 3.0, 1.5, 1.0)
