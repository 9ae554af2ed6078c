"""`graftlm bench roofline` compares the operators of real models with measured ceilings."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from graftlm.bench.roofline import (
    Case,
    Effort,
    fitting_cases,
    longest_context,
    open_rig,
    print_roofline,
    run_roofline,
    save_roofline_plot,
)
from graftlm.bench.roofline.ceilings import Ceilings
from graftlm.bench.roofline.cost import Cost
from graftlm.bench.roofline.report import case_figures
from graftlm.cli import main
from graftlm.config import EngineConfig

SMALL = Effort(read_bytes=1 << 20, matrix_shapes=((64, 64, 64), (128, 128, 128)), rounds=2, turn_s=0.0)
CASES = [Case("decode", 1, 40), Case("decode", 3, 40), Case("prefill", 1, 33)]
OPERATORS = [
    "fused QKV",
    "attention",
    "output projection",
    "gate-up",
    "down",
    "norms",
    "rope",
    "activation",
    "lm_head",
    "sampler",
    "attention plan",
    "everything else",
]


def report_of(path, *overrides):
    config = EngineConfig.load(None, [f"model.path={path}", "cache.page_size=4", *overrides])
    with open_rig(config, CASES) as rig:
        return run_roofline(rig, CASES, SMALL, model=str(path), settings=["a.b=1"], left_out=["a line"])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "mixtral", "phi3"])
def test_every_model_family_is_divided_into_the_same_operators(checkpoint, name):
    report = report_of(checkpoint(name))
    # only a model with experts has these operators
    expected = [operator for operator in OPERATORS if operator != "activation" or name == "mixtral"]
    for figures in report.cases:
        assert [row.name for row in figures.operators] == expected
        assert sum(row.share_of_step for row in figures.operators) == pytest.approx(1)
        assert all(row.time_s > 0 for row in figures.operators)
        counted = [row for row in figures.operators if row.num_bytes]
        assert [row.name for row in counted] == expected[:-2]
        assert all(row.share_of_ceiling > 0 and row.bound in ("memory", "matrix") for row in counted)
        assert figures.num_steps >= SMALL.rounds
    assert report.ceilings.read_bytes_per_s > 0
    assert report.ceilings.matrix_shape in SMALL.matrix_shapes
    assert report.left_out == ("a line",)
    assert report.settings == ("a.b=1",)


def test_weights_count_once_and_cached_keys_per_request(checkpoint):
    one, three, prefill = report_of(checkpoint("llama"), "model.dtype=bfloat16").cases
    config = json.loads((Path(checkpoint("llama")) / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2
    assert three.model_bytes - one.model_bytes == 2 * (40 + 1) * token_bytes
    matrices = {"fused QKV", "output projection", "gate-up", "down"}
    flops = [sum(row.flops for row in case.operators if row.name in matrices) for case in (one, three, prefill)]
    assert flops == [flops[0], 3 * flops[0], 33 * flops[0]]


def test_a_share_is_the_time_at_the_ceiling_divided_by_the_measured_time():
    ceilings = Ceilings(100.0, "sum", 1, 1000.0, (1, 1, 1), "float32")
    costs = {
        "fused QKV": Cost(weight_bytes=40, activation_bytes=10, flops=100),
        "attention": Cost(kv_bytes=1, flops=500),
    }
    steps = [{"fused QKV": 1.0, "attention": 2.0, "everything else": 1.0}] * 3
    figures = case_figures(CASES[0], costs, [3.0, 4.0, 9.0], steps, ceilings)
    assert [(row.bound, row.share_of_ceiling) for row in figures.operators] == [
        ("memory", 0.5),
        ("matrix", 0.25),
        (None, None),
    ]
    assert [row.share_of_step for row in figures.operators] == [0.25, 0.5, 0.25]
    assert (figures.step_s, figures.apart_s) == (4.0, 4.0)
    assert figures.share_of_read == pytest.approx(41 / 100 / 4)
    assert figures.share_of_matrix == pytest.approx(600 / 1000 / 4)


def test_a_step_beyond_the_context_is_left_out_with_a_message(checkpoint):
    longest = longest_context(EngineConfig.load(None, [f"model.path={checkpoint('llama')}", "model.context_len=600"]))
    fits, left_out = fitting_cases([1, 16], 599, [512, 600, 4096], longest)
    assert fits == [Case("decode", 1, 599), Case("decode", 16, 599), Case("prefill", 1, 512)]
    assert left_out == [
        "prefill of 600 tokens: left out, because the model's context has only 600 tokens",
        "prefill of 4,096 tokens: left out, because the model's context has only 600 tokens",
    ]


def test_a_report_is_printed_and_plotted(checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    report, out = report_of(checkpoint("llama")), io.StringIO()
    print_roofline(report, Console(file=out, width=200))
    for text in ("GB/s read", "decode, batch 3, context 40", "% of the measured read bandwidth", "a line"):
        assert text in out.getvalue()
    save_roofline_plot(report, tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()


def test_the_command_refuses_cases_that_all_exceed_the_context(checkpoint, capsys):
    arguments = ["--model", str(checkpoint("llama")), "--batch", "2", "--context", "9000", "--prefill", "9000"]
    with pytest.raises(SystemExit) as caught:
        main(["bench", "roofline", *arguments])
    assert caught.value.code
    assert "prefill of 9,000 tokens: left out" in capsys.readouterr().err


@pytest.mark.full
def test_the_command_prints_saves_and_plots(checkpoint, tmp_path, capfd):
    pytest.importorskip("matplotlib")
    saved, drawn = tmp_path / "found.json", tmp_path / "found.svg"
    arguments = ["--model", str(checkpoint("llama")), "--batch", "2", "--context", "64", "--prefill", "48,9000"]
    with pytest.raises(SystemExit) as caught:
        main(["bench", "roofline", *arguments, "--rounds", "1", "--json", str(saved), "--plot", str(drawn)])
    assert not caught.value.code
    out = capfd.readouterr().out
    assert "GB/s read" in out
    assert "decode, batch 2, context 64" in out
    assert "% of the measured read bandwidth, counting weights and KV once" in out
    assert "prefill of 9,000 tokens: left out" in out
    report = json.loads(saved.read_text())
    assert [case["case"]["kind"] for case in report["cases"]] == ["decode", "prefill"]
    assert "<svg" in drawn.read_text()


@pytest.mark.gpu
def test_steps_on_a_gpu_are_timed_by_events(checkpoint):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    report = report_of(checkpoint("llama"), "model.device=cuda")
    assert all(row.time_s > 0 for case in report.cases for row in case.operators)
