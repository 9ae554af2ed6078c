"""Random walks under the masks of generated specifications, for every grammar backend."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from graftlm.contracts import GrammarKind
from graftlm.testing.grammar_specs import generate_specs

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def walks():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("benchmarks_grammar_walks", FOLDER / "grammar_walks.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))


def test_masks_matchers_and_outputs_agree(walks, tmp_path, capsys):
    out = tmp_path / "walks.json"
    arguments = ["--specs", "24", "--vocab", "2000", "--walks", "1", "--max-compile-s", "0.3", "--out", str(out)]
    assert walks.main(arguments) == 0
    rows = json.loads(out.read_text())
    assert [row["backend"] for row in rows] == ["llguidance", "outlines", "xgrammar"]
    for row in rows:
        assert (row["specs"], row["disagreements"]) == (24, [])
        # On a busy machine, outlines may refuse a grammar that it has not compiled in time.
        assert row["finished"] > (0 if row["backend"] == "outlines" else 5)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_an_output_that_violates_its_specification_is_a_disagreement(walks):
    walk = walks.Walk(text="ac", is_finished=True)
    assert walks.complaints_about("ab".__eq__, walk) == ["the output does not meet its specification"]
    assert walks.complaints_about("ac".__eq__, walk) == []
    assert walks.complaints_about("ab".__eq__, walks.Walk(text="a", is_finished=False)) == []


def test_a_seed_fixes_specifications_of_all_kinds():
    specs = generate_specs(40, seed=3)
    assert specs == generate_specs(60, seed=3)[:40] != generate_specs(40, seed=4)
    assert {spec.kind for spec in specs} == set(GrammarKind)
