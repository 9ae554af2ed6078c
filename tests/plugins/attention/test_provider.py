"""What this package offers, and where; nothing here imports Triton."""

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
        (Platform("cpu"), "run on a CUDA device, this is 'cpu'"),
        (Platform("cuda", (7, 5)), "needs compute capability 8.0 (Ampere) or later, this device has 7.5"),
    ],
)
@pytest.mark.usefixtures("with_triton")
def test_triton_says_why_it_cannot_run(platform, reason):
    assert reason in triton().unavailable(platform)


@pytest.mark.usefixtures("with_triton")
def test_triton_is_the_first_choice_on_cuda():
    ranks = {provider.name: provider.rank for provider in provide_attention_backends()}
    assert triton().unavailable(Platform("cuda", (9, 0))) is None
    assert ranks["triton"] > ranks["torch_native"]
    assert triton().api_version == API_VERSION
    assert triton().capabilities.graph


@pytest.mark.usefixtures("with_triton")
def test_interpreted_triton_serves_float32_on_a_cpu_and_is_the_last_choice(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    provider = triton()
    assert provider.unavailable(Platform("cpu")) is None
    assert "interpreted" in provider.unavailable(Platform("cuda", (9, 0)))
    assert (provider.capabilities.devices, provider.capabilities.dtypes) == (("cpu",), ("float32",))
    assert not provider.capabilities.graph
    assert provider.rank < min(other.rank for other in provide_attention_backends() if other.name != "triton")


@pytest.mark.parametrize("split_tokens", [0, 64, 200, -128])
def test_pieces_of_other_lengths_are_refused(split_tokens):
    with pytest.raises(ValidationError, match="split_tokens"):
        TritonOptions(split_tokens=split_tokens)


@pytest.mark.parametrize("provider", provide_attention_backends(), ids=lambda provider: provider.name)
def test_every_backend_and_option_is_documented(provider):
    page = (Path(__file__).parents[3] / "docs" / "attention.md").read_text(encoding="utf-8")
    section = page.split(f"## Options of `{provider.name}`")[1].split("\n## ")[0]
    assert [name for name in provider.options.model_fields if f"| `{name}` |" not in section] == []
