"""For every grammar backend, outputs that end under a generated schema or regular expression match it."""

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest

from graftlm.demo import demo_checkpoint
from graftlm.registry import Registry
from graftlm.testing.grammar_specs import generate_regexes, generate_schemas

BACKENDS = sorted(Registry.load().names("grammar"))
SPECS = [*generate_schemas(40, seed=1), *generate_regexes(20, seed=1)]
SOURCE = Path(__file__).parents[2] / "benchmarks" / "grammar_validity.py"


@pytest.fixture(scope="module")
def validity():
    spec = importlib.util.spec_from_file_location("benchmarks_grammar_validity", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["bundled", "random"])
def model(request, validity, tmp_path_factory):
    if request.param == "bundled":
        return demo_checkpoint()
    return validity.write_random_model(tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def specs(request):
    """All specifications, or half of them in the quick set."""
    return SPECS if request.config.getoption("--full") else SPECS[::2]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_output_is_valid_or_cut_short_or_its_specification_is_refused(validity, model, backend, specs):
    with validity.open_engine(model, backend, "flexible", len(specs)) as engine:
        for temperature in validity.TEMPERATURES:
            row = validity.Row(backend, "flexible", model.name, temperature)
            validity.measure(engine, specs, row, max_tokens=100)
            assert (row.invalid, row.failed) == ([], [])
            assert row.valid + row.length + row.refused == len(specs)
            assert row.valid > len(specs) / 2


@pytest.mark.parametrize(
    ("spec", "text", "is_valid"),
    [
        ({"type": "integer"}, "12", True),
        ({"type": "integer"}, "12 apples", False),
        ({"type": "integer"}, '"12"', False),
        ({"type": "string", "format": "date"}, '"2024-02-30"', False),
        (r"\d{2}", "12", True),
        (r"\d{2}", "123", False),
        (r"\d{2}", "१२", False),
    ],
)
def test_outputs_are_judged_by_the_whole_specification(validity, spec, text, is_valid):
    assert (validity.complaint_about(spec, text) is None) == is_valid


def test_the_benchmark_counts_all_outputs_and_reports_no_error(validity, tmp_path, capsys):
    out = tmp_path / "new" / "out.json"
    arguments = ["--schemas", "3", "--regexes", "3", "--backends", BACKENDS[0], "--whitespace", "compact"]
    assert validity.main([*arguments, "--max-tokens", "40", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["temperature"]) for row in rows] == [
        ("bundled", 0),
        ("bundled", 1.5),
        ("random", 0),
        ("random", 1.5),
    ]
    assert all(row["valid"] + row["length"] + row["refused"] == 6 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_seed_fixes_the_specifications_and_they_are_well_formed():
    assert generate_schemas(40, seed=1) == generate_schemas(50, seed=1)[:40] != generate_schemas(40, seed=2)
    assert generate_regexes(20, seed=1) == generate_regexes(30, seed=1)[:20] != generate_regexes(20, seed=2)
    for schema in [schema for seed in range(6) for schema in generate_schemas(100, seed)]:
        jsonschema.Draft202012Validator.check_schema(schema)
