"""docs/scheduling.md lists every policy and option, and its example keeps the contract."""

import json
import re
from pathlib import Path

import pytest

import graftlm_scheduling
from graftlm.contracts import SchedulingContext, SchedulingPolicy
from graftlm.testing import SchedulingPolicyConformance

PAGE = (Path(__file__).parents[3] / "docs" / "scheduling.md").read_text(encoding="utf-8")
PROVIDERS = graftlm_scheduling.provide_scheduling_policies()
FIELDS = [(p.name, name, field) for p in PROVIDERS for name, field in p.options.model_fields.items()]


def example() -> type[SchedulingPolicy]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, type[SchedulingPolicy]] = {}
    exec(compile(code, "docs/scheduling.md", "exec"), names)
    return names["ShortestPromptFirst"]


class TestTheExample(SchedulingPolicyConformance):
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        return example()()


def test_the_table_names_every_policy():
    rows = PAGE.split("| Name |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) == {provider.name for provider in PROVIDERS}


@pytest.mark.parametrize(("policy", "name", "field"), FIELDS, ids=[f"{policy}.{name}" for policy, name, _ in FIELDS])
def test_every_option_is_described_with_its_default(policy, name, field):
    default = json.dumps(field.default)
    (row,) = re.findall(rf"^\|.*`{policy}`.*\| `{name}` \| `{default}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert row == field.description
