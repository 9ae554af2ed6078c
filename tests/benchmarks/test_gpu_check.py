"""Every part of the GPU check except its tests also runs on a CPU, where its figures mean nothing."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

from graftlm.bench.roofline import Effort
from graftlm.testing.sparse_checkpoint import write_sparse_checkpoint

SOURCE = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("benchmarks_gpu_check", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def bench(gpu_check, tmp_path):
    shape = gpu_check.SHAPES["tiny"]
    write_sparse_checkpoint(tmp_path, shape)
    return gpu_check.Bench(
        torch.device("cpu"),
        shape,
        context=40,
        end_s=time.monotonic() + 120,
        folder=tmp_path,
        batches=(1, 3),
        prefills=(20,),
        effort=Effort(1 << 20, ((8, 8, 8),), rounds=1),
        turn_s=0.0,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_without_a_device_the_check_fails_with_a_message(gpu_check, capsys):
    with pytest.raises(SystemExit) as caught:
        gpu_check.main([])
    assert caught.value.code == 1
    assert "gpu-check needs a CUDA device, and torch finds none" in capsys.readouterr().err


def test_steps_are_measured_with_and_without_graphs(gpu_check, bench):
    result = gpu_check.run_part("steps", bench)
    assert result["error"] is None
    assert [(row["step"], row["graphs"]) for row in result["rows"]] == [
        ("decode, batch 1, context 40", True),
        ("decode, batch 3, context 40", True),
        ("decode, batch 1, context 40", False),
        ("decode, batch 3, context 40", False),
        ("prefill of 20 tokens", False),
    ]
    assert all(row["ms"] > 0 and row["of bandwidth"] > 0 for row in result["rows"])


@pytest.mark.full
def test_serving_is_measured_with_and_without_overlap_and_graphs(gpu_check, bench):
    result = gpu_check.run_part("serving", bench)
    assert result["error"] is None
    assert len({(row["overlap"], row["graphs"]) for row in result["rows"]}) == 4
    assert all(0 <= row["device idle"] < 1 for row in result["rows"])


def test_sampling_filters_are_compared_with_a_sort(gpu_check, bench):
    result = gpu_check.run_part("sampling", bench)
    assert result["error"] is None
    assert [(row["rows"], set(row)) for row in result["rows"]] == [
        (rows, {"rows", "top-k ms", "top-p ms", "sort ms"}) for rows in (1, 3)
    ]
    assert all(value > 0 for row in result["rows"] for value in row.values())


def test_kernels_agree_with_the_reference(gpu_check, bench):
    result = gpu_check.run_part("kernels", bench)
    assert result["error"] is None
    assert [row["page size"] for row in result["rows"]] == [1, 16, 64]


def test_a_failing_part_is_reported_and_a_part_without_time_is_left_out(gpu_check, bench):
    (bench.folder / "model.safetensors").unlink()
    assert "safetensors" in gpu_check.run_part("serving", bench)["error"]
    bench.end_s = time.monotonic()
    result = gpu_check.run_part("kernels", bench)
    assert (result["rows"], result["error"]) == ([], None)
    assert result["notes"] == ["kernels: left out, the time is over (--budget-s)"]
