"""docs/quantization.md lists the quantizations and their options."""

import re
from pathlib import Path

import pytest

from graftlm_quantization import Fp8Options, Int4Options, Int8Options, provide_quantizations

TEXT = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [provider.name for provider in provide_quantizations()])
def test_every_quantization_is_documented(name):
    assert f"| `{name}` |" in TEXT


def test_exactly_the_existing_options_are_documented():
    documented = re.findall(r"^\| `(\w+)` \| `?[\[\w]", TEXT.split("| Option |")[1].split("\n\n")[0], re.MULTILINE)
    assert set(documented) == set(Int4Options.model_fields) == set(Int8Options.model_fields)
    assert set(Fp8Options.model_fields) == {"keep"}
