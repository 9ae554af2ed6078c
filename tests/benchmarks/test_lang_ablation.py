"""The ablation of LM programs runs at a small scale, and its figures are right."""

import asyncio
import importlib
import json
import sys
from pathlib import Path

import pytest

from graftlm.lang.backend import Generation
from graftlm.lang.chat_template import find_template

FOLDER = Path(__file__).parents[2] / "benchmarks"
WORKLOADS = ["LLM judge", "few-shot"]
VARIANTS = ["full", "full again", "no cache", "no tree"]


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("lang_ablation")
    sys.path.remove(str(FOLDER))
    for name in ("lang_ablation", "lang_programs", "flat_table"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(bench, tmp_path_factory):
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("results") / "new"
    settings = ["--rounds", "1", "--scale", "0.1", "--kv-tokens", "4096", "--only", *WORKLOADS]
    settings += ["--variants", *VARIANTS[2:], "--json", str(folder / "out.json"), "--plot", str(folder / "out.svg")]
    bench.main(settings)
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    rows = json.loads((folder / "out.json").read_text())["rows"]
    return {(row["workload"], row["variant"]): row for row in rows}


def test_every_variant_runs_on_every_workload(rows):
    assert set(rows) == {(workload, variant) for workload in WORKLOADS for variant in VARIANTS}
    for row in rows.values():
        assert row["wall_s"] > 0
        assert row["cpu_s"] > 0
        assert row["times_full"] > 0
        assert len(row["rounds"]) == 1


def test_a_table_finds_an_essay_after_a_hint_but_no_task_examples(rows):
    computed = {name: row["computed_tokens"] for name, row in rows.items()}
    assert computed["few-shot", "full"] < computed["few-shot", "no tree"] / 2
    assert computed["few-shot", "no tree"] <= computed["few-shot", "no cache"]
    assert computed["LLM judge", "full"] <= computed["LLM judge", "no tree"] < computed["LLM judge", "no cache"] / 2


class CountingBackend:
    """Counts hints and concurrent requests; answers no request before `awaited` of them have arrived."""

    def __init__(self, awaited):
        self.num_hints = self.num_now = self.most_at_a_time = 0
        self._awaited, self._are_there = awaited, asyncio.Event()

    async def generate(self, request):
        self.num_now += 1
        self.most_at_a_time = max(self.most_at_a_time, self.num_now)
        if self.num_now == self._awaited:
            self._are_there.set()
        await asyncio.wait_for(self._are_there.wait(), 30)
        await asyncio.sleep(0.01)  # time in which further requests would arrive
        self.num_now -= 1
        return [Generation("fine")]

    async def cache_prefix(self, prompt):
        self.num_hints += 1

    async def chat_template(self):
        return find_template("chatml", "")


@pytest.mark.parametrize(
    ("variant", "num_hints", "most_at_a_time"), [("full", 1, 6), ("no parallelism", 1, 1), ("no hint", 0, 6)]
)
def test_a_variant_switches_off_its_part_of_the_language(bench, variant, num_hints, most_at_a_time):
    counting, settings = CountingBackend(most_at_a_time), bench.VARIANTS[variant]
    backend = bench.Restrained(counting, settings.has_hints, settings.is_parallel)
    bench.WORKLOADS["LLM judge"].program.run(rubric="Be fair. " * 20, essay="Trees.", backend=backend)
    assert (counting.num_hints, counting.most_at_a_time) == (num_hints, most_at_a_time)


def test_the_plot_shows_every_variant_except_the_repeated_one(folder):
    assert (folder / "out.svg").stat().st_size > 10_000


def run(bench, seconds):
    return bench.Run(seconds, 2 * seconds, 10, 5, 0)


def test_ratios_use_the_median_of_both_full_runs(bench):
    taken = {"full": [1.0, 9.0], "full again": [2.0, 2.0], "no hint": [1.0, 3.0], "FCFS": [0.5, 0.5]}
    rows = bench.summarize("w", {name: [run(bench, t) for t in times] for name, times in taken.items()})
    assert {row.variant: (row.wall_s, row.times_full, row.faster) for row in rows} == {
        "full": (5.0, 2.5, 3 / 8),
        "full again": (2.0, 1.0, 2 / 8),
        "no hint": (2.0, 1.0, 4 / 8),
        "FCFS": (0.5, 0.25, 1.0),
    }
    assert all(row.cpu_times_full == row.times_full for row in rows)


def test_a_variant_that_is_faster_than_full_is_reported(bench, capsys):
    taken = {"full": [1.0, 1.0], "full again": [0.5, 0.5], "no hint": [0.4, 0.4], "FCFS": [0.7, 0.7]}
    bench.show(bench.summarize("w", {name: [run(bench, t) for t in times] for name, times in taken.items()}))
    printed = capsys.readouterr().out
    assert "w: no hint beats full beyond noise: 0.53 of its time" in printed
    assert "w: FCFS beats" not in printed
    assert "w: full again beats" not in printed


def test_the_docs_page_has_the_measured_figures():
    page = (FOLDER.parent / "docs" / "lang.md").read_text(encoding="utf-8")
    table = page.partition("| | Tree of thought |")[2].partition("\n\n")[0]
    rows = json.loads((FOLDER / "results" / "lang_ablation.json").read_text(encoding="utf-8"))["rows"]
    figures = {}
    for row in rows:
        figures.setdefault(row["variant"], []).append(f"{row['cpu_times_full']:.2f} | {row['computed_tokens']:,}")
    assert [line.split(" | ", 1)[1].removesuffix(" |") for line in table.splitlines()[3:]] == [
        " | ".join(of_variant) for of_variant in figures.values()
    ]
