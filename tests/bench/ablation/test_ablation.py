"""`graftlm bench ablation` runs an engine with one part switched off at a time."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from graftlm.bench.ablation import SWITCHES
from graftlm.bench.ablation.report import effect
from graftlm.bench.offline import Run
from graftlm.cli import main
from graftlm.config import EngineConfig

RUN = Run("unshared", "full", 1, 10, 10, 1.0, 10.0, 20.0, 1.0, 1.0, 1.0, 1.0, 0.0, 10, 1.0, 1.0, 0)


@pytest.fixture(scope="module")
def num_rounds(request):
    return 2 if request.config.getoption("--full") else 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory, num_rounds):
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("ablation")
    arguments = ["--workload", "unshared,structured", "--off", "prefix_cache,chunk_mixing,jump_forward,graphs"]
    arguments += [
        "--scale",
        "0.05",
        "--rounds",
        str(num_rounds),
        "--set",
        "memory.kv_tokens=4096",
        "--set",
        "model.device=cpu",
    ]
    arguments += ["--json", str(folder / "found.json"), "--plot", str(folder / "found.png")]
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as caught:
        main(["bench", "ablation", *arguments])
    assert not caught.value.code
    (folder / "said.txt").write_text(said.getvalue())
    return folder


def test_each_part_is_switched_off_once_in_every_round(saved, num_rounds):
    report = json.loads((saved / "found.json").read_text())
    assert [(one["workload"], one["switch"]) for one in report["effects"]] == [
        ("unshared", "full"),
        ("unshared", "prefix_cache"),
        ("unshared", "chunk_mixing"),
        ("unshared", "graphs"),
        ("structured", "full"),
        ("structured", "prefix_cache"),
        ("structured", "chunk_mixing"),
        ("structured", "jump_forward"),
        ("structured", "graphs"),
    ]
    assert len(report["runs"]) == num_rounds * 9
    for one in report["effects"]:
        assert one["ratio_q1"] <= one["ratio"] <= one["ratio_q3"]
        assert one["wall_s"] > 0
    assert {one["ratio"] for one in report["effects"] if one["switch"] == "full"} == {1.0}
    assert (saved / "found.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_rounds_cause_a_warning(saved):
    assert "too few rounds" in (saved / "said.txt").read_text()


def test_a_meaningless_comparison_is_reported_as_not_applicable(saved):
    report = json.loads((saved / "found.json").read_text())
    assert report["not_applicable"] == [
        {"switch": "jump_forward", "workload": "unshared", "reason": "no request has a grammar"},
    ]


def test_graphs_are_not_applicable_on_a_cpu_that_only_pads():
    config = EngineConfig.load(None, ["model.device=cpu", "execution.graphs=true"])
    assert SWITCHES["graphs"].not_applicable(config) == "on a CPU, steps are replayed only if execution.graphs is auto"


def test_jump_forward_takes_fewer_steps_than_sampling_forced_text(saved):
    runs = json.loads((saved / "found.json").read_text())["runs"]
    steps = {run["variant"]: run["steps"] for run in runs if run["workload"] == "structured"}
    assert steps["full"] < steps["jump_forward"]


@pytest.mark.parametrize(
    ("name", "override", "path"),
    [
        ("prefix_cache", "cache.name=chunk", "cache.name"),
        ("overlap", "scheduling.overlap=false", "scheduling.overlap"),
        ("prepacking", "model.prepack=false", "model.prepack"),
        ("fused_ops", "model.native_ops=false", "model.native_ops"),
        ("chunk_mixing", "scheduling.mix_chunks=false", "scheduling.mix_chunks"),
        ("jump_forward", "grammar.jump_forward=false", "grammar.jump_forward"),
        ("graphs", "execution.graphs=false", "execution.graphs"),
    ],
)
def test_a_switch_changes_its_setting_and_is_not_applicable_if_already_off(name, override, path):
    config = EngineConfig.load(None, ["model.device=cpu", "memory.kv_tokens=64"])
    off = EngineConfig.load(config, [override])
    assert SWITCHES[name].switched_off(config).model_dump() == off.model_dump()
    if name != "graphs":  # on a CPU that is said first
        assert SWITCHES[name].not_applicable(off) == "it is already off in this configuration"


def test_a_ratio_compares_two_runs_of_one_round():
    full = [replace(RUN, wall_s=wall_s) for wall_s in (1.0, 10.0, 100.0)]
    without = [replace(RUN, variant="overlap", wall_s=wall_s) for wall_s in (2.0, 20.0, 300.0)]
    found = effect(without, full)
    assert (found.switch, found.wall_s) == ("overlap", 20.0)
    assert (found.ratio_q1, found.ratio, found.ratio_q3) == (2.0, 2.0, 2.5)
