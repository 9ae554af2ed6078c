"""The table of architectures that run as Transformers' own modules: a sample of its rows, and its completeness."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "benchmarks" / "transformers_architectures.py"
PAGE = (ROOT / "docs" / "model-support.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("benchmarks_transformers_architectures", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations in sys.modules
    yield (spec.loader.exec_module(module), module)[1]
    del sys.modules[spec.name]


# These have learned positions; latent attention and experts; windows and soft caps; two attention calls per layer;
# scaled logits.
@pytest.mark.parametrize("model_type", ["gpt2", "deepseek_v3", "vaultgemma", "diffllama", "granitemoe"])
def test_an_architecture_generates_the_tokens_of_transformers(bench, tmp_path, model_type):
    (architecture,) = (one for one in bench.ARCHITECTURES if one.model_type == model_type)
    finding = bench.examine(architecture, tmp_path / model_type)
    assert finding.is_equal
    assert not finding.is_defect
    assert finding.row() in PAGE.splitlines()


def test_a_refused_architecture_has_its_reason_on_the_page(bench, tmp_path):
    (architecture,) = (one for one in bench.ARCHITECTURES if one.model_type == "lfm2")
    finding = bench.examine(architecture, tmp_path)
    assert finding.refusal is not None
    assert finding.row() in PAGE.splitlines()


def test_the_page_lists_the_architectures_of_the_script(bench):
    parts = dict(zip(("served", "refused"), re.split("## Served|## Refused", PAGE)[1:], strict=True))
    listed = {part: re.findall(r"^\| `(\w+)` \| `\w+` \|", text, re.MULTILINE) for part, text in parts.items()}
    assert listed["served"] == [one.model_type for one in bench.ARCHITECTURES if one.is_served]
    assert listed["refused"] == [one.model_type for one in bench.ARCHITECTURES if not one.is_served]
    assert len(listed["served"]) >= 25
