"""docs/routing.md lists every policy and option."""

import json
import re
from pathlib import Path

import pytest

import graftlm_routing

PAGE = (Path(__file__).parents[3] / "docs" / "routing.md").read_text(encoding="utf-8")
PROVIDERS = graftlm_routing.provide_routing_policies()
FIELDS = [(p.name, name, field) for p in PROVIDERS for name, field in p.options.model_fields.items()]


def test_the_table_names_every_policy():
    rows = PAGE.split("| Name |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) == {provider.name for provider in PROVIDERS}


@pytest.mark.parametrize(("policy", "name", "field"), FIELDS, ids=[f"{policy}.{name}" for policy, name, _ in FIELDS])
def test_every_option_is_described_with_its_default(policy, name, field):
    row = f"| `{policy}` | `{name}` | `{json.dumps(field.default)}` | {field.description} |"
    assert row in PAGE.splitlines()
