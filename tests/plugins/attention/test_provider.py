"""The attention providers and where they can run; no test here imports Triton."""

import importlib.util
from pathlib import Path

import pytest
from pydantic import ValidationError

from graftlm.contracts import API_VERSION, Platform
from graftlm_attention import TritonOptions, provide_attention_backends


def triton():
    return {provider.name: provider for provider in provide_attention_backends()}["triton"]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def with_triton():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the package triton")


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        (Platform("cpu"), "run on a CUDA device; this device is 'cpu'"),
        (Platform("cuda", (7, 5)), "needs compute capability 8.0 (Ampere) or later, this device has 7.5"),
    ],
)
@pytest.mark.usefixtures("with_triton")
def test_the_reason_why_triton_cannot_run_is_reported(platform, reason):
    assert reason in triton().unavailable(platform)


@pytest.mark.usefixtures("with_triton")
def test_triton_is_the_first_choice_on_cuda():
    ranks = {provider.name: provider.rank for provider in provide_attention_backends()}
    assert triton().unavailable(Platform("cuda", (9, 0))) is None
    assert ranks["triton"] > ranks["torch_native"]
    assert triton().api_version == API_VERSION
    assert triton().capabilities.graph


@pytest.mark.usefixtures("with_triton")
def test_interpreted_triton_supports_float32_on_a_cpu_with_the_lowest_rank(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    provider = triton()
    assert provider.unavailable(Platform("cpu")) is None
    assert "interpreted" in provider.unavailable(Platform("cuda", (9, 0)))
    assert (provider.capabilities.devices, provider.capabilities.dtypes) == (("cpu",), ("float32",))
    assert not provider.capabilities.graph
    assert provider.rank < min(other.rank for other in provide_attention_backends() if other.name != "triton")


def flashinfer():
    return {provider.name: provider for provider in provide_attention_backends()}["flashinfer"]


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        (Platform("cpu"), "run on a CUDA device; this device is 'cpu'"),
        (Platform("cuda", (7, 5)), "needs compute capability 8.0 (Ampere) or later, this device has 7.5"),
    ],
)
def test_the_reason_why_flashinfer_cannot_run_is_reported(platform, reason):
    assert reason in flashinfer().unavailable(platform)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_a_missing_flashinfer_is_detected_without_an_import():
    assert flashinfer().unavailable(Platform("cuda", (9, 0))) == (
        "the package flashinfer-python is not installed: pip install graftlm[flashinfer]"
    )


@pytest.mark.parametrize("version", ["0.6.14", "0.2.0.post1"])
def test_an_older_flashinfer_is_refused(version, tmp_path, monkeypatch):
    folder = tmp_path / f"flashinfer_python-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert f"needs flashinfer-python 0.7 or later, but {version} is installed" in flashinfer().unavailable(
        Platform("cuda")
    )


def test_flashinfers_capabilities_match_its_kernels():
    can = flashinfer().capabilities
    assert (can.page_sizes, can.graph, can.cascade) == ((1, 16), True, True)
    assert not can.sinks
    assert not can.value_prefix
    assert flashinfer().rank < min(other.rank for other in provide_attention_backends() if other.name != "flashinfer")


@pytest.mark.parametrize("split_tokens", [0, 64, 200, -128])
def test_invalid_split_lengths_are_refused(split_tokens):
    with pytest.raises(ValidationError, match="split_tokens"):
        TritonOptions(split_tokens=split_tokens)


@pytest.mark.parametrize("provider", provide_attention_backends(), ids=lambda provider: provider.name)
def test_every_backend_and_option_is_documented(provider):
    page = (Path(__file__).parents[3] / "docs" / "attention.md").read_text(encoding="utf-8")
    section = page.split(f"## Options of `{provider.name}`")[1].split("\n## ")[0]
    assert [name for name in provider.options.model_fields if f"| `{name}` |" not in section] == []
