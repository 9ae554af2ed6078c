"""docs/benchmarking.md names every option, part and saved field of the commands that measure an engine."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from typer.main import get_command

from graftlm.bench.ablation import SWITCHES, AblationReport
from graftlm.bench.offline import WORKLOADS
from graftlm.bench.roofline import RooflineReport
from graftlm.cli.bench import app

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text(encoding="utf-8")
SECTION = PAGE.split("# Measuring an engine in its own process")[1]
OWN_WORDS = {"machine", "runs"}  # the first is a value of its own; `offline` prints the fields of the second


def leaves(kind, path=""):
    for field in fields(kind):
        hint = get_type_hints(kind)[field.name]
        inner = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        name = f"{path}{field.name}"
        if inner is None or name in OWN_WORDS:
            yield name
        else:
            yield from leaves(inner, f"{name}.")


@pytest.mark.parametrize("report", [RooflineReport, AblationReport])
def test_every_saved_field_is_documented(report):
    assert {name for name in leaves(report) if f"`{name}`" not in SECTION} == set()


@pytest.mark.parametrize("command", ["offline", "roofline", "ablation"])
def test_every_option_is_documented(command):
    options = {name for parameter in get_command(app).commands[command].params for name in parameter.opts}
    named = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", SECTION))
    assert options - named <= {"--help"}


@pytest.mark.parametrize("name", [*SWITCHES, *WORKLOADS])
def test_every_part_and_workload_is_documented(name):
    assert f"| `{name}` |" in SECTION
