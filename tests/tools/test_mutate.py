"""Mutations are tried in copies of the repository, and every listed mutation can be applied to the code."""

from dataclasses import replace
from pathlib import Path

import pytest

from mutate import Mutation, load, try_all

ROOT = Path(__file__).parents[2]
TEST = "tests/test_add.py"
MUTATION = Mutation("minus for plus", "core/adding.py", "a + b", "a - b", (TEST,))


@pytest.fixture
def copy(tmp_path):
    """A repository with one function and its test."""
    files = {
        "core/adding.py": "def add(a, b):\n    return a + b\n",
        "plugins/.keep": "",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p no:schemathesis"\n',  # it takes seconds to load
        TEST: "from adding import add\n\n\ndef test_add():\n    assert add(0, 2) == 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_mutation_is_reported_as_caught_or_surviving_and_then_reverted(copy, capsys):
    survivor = replace(MUTATION, name="terms exchanged", new="b + a")
    assert try_all([MUTATION, survivor], [copy]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [(line.split()[0], line.rpartition(": ")[2]) for line in lines[:2]] == [
        ("caught", "minus for plus"),
        ("SURVIVED", "terms exchanged"),
    ]
    assert lines[2] == "1 of 2 mutations caught"
    assert "a + b" in (copy / MUTATION.path).read_text()
    assert try_all([MUTATION], [copy]) == 0


def test_tests_that_fail_without_a_mutation_are_reported(copy, capsys):
    (copy / TEST).write_text("def test_add():\n    raise AssertionError\n")
    assert try_all([MUTATION], [copy]) == 1
    assert "the tests fail without a mutation" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"old": "a * b"}, {"old": "a"}, {"new": "a + b"}])
def test_a_text_that_does_not_occur_exactly_once_is_refused(copy, changes):
    with pytest.raises(ValueError, match="expected 1 and another text"):
        replace(MUTATION, **changes).apply(copy)


@pytest.mark.parametrize("mutation", load(ROOT / "tests/mutations"), ids=lambda mutation: mutation.name)
def test_a_listed_mutation_can_be_applied(mutation, tmp_path):
    file = tmp_path / mutation.path
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / mutation.path).read_text())
    mutation.apply(tmp_path)
    assert file.read_text() != (ROOT / mutation.path).read_text()
    if mutation.path.endswith(".py"):
        compile(file.read_text(), mutation.path, "exec")
    for test in mutation.tests:
        assert (ROOT / test.partition("::")[0]).exists()
