"""docs/speculation.md names every drafter and option as they are."""

import json
import re
from pathlib import Path

import pytest

import graftlm_speculation
from graftlm.config import SpeculationSettings

PAGE = (Path(__file__).parents[3] / "docs" / "speculation.md").read_text(encoding="utf-8")
PROVIDERS = graftlm_speculation.provide_drafters()
OPTIONS = [(p.name, name, field) for p in PROVIDERS for name, field in p.options.model_fields.items()]


def test_the_table_names_every_drafter_in_the_order_of_auto():
    rows = PAGE.split("| Name |")[1].split("\n\n")[0]
    by_rank = sorted(PROVIDERS, key=lambda provider: -provider.rank)
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == [provider.name for provider in by_rank]


@pytest.mark.parametrize(
    ("drafter", "name", "field"), OPTIONS, ids=[f"{drafter}.{name}" for drafter, name, _ in OPTIONS]
)
def test_every_option_is_described_with_its_default(drafter, name, field):
    default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
    assert f"| `{name}`, option of `{drafter}` | {default} |" in PAGE


def test_every_setting_is_described_with_its_default():
    assert f"| `speculation.max_drafts` | `{SpeculationSettings().max_drafts}` |" in PAGE
    assert f"| `speculation.drafter.name` | `{json.dumps(SpeculationSettings().drafter.name)}` |" in PAGE
