"""docs/grammar-support.md equals the output of its generator."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("grammar_support")
    for name in ("grammar_support", "grammar_cases", "grammar_judges"):
        sys.modules.pop(name, None)


def rows(page):
    """Return the page's lines without the number of texts, which depends on the number of walks."""
    return re.sub(r"[\d,]+ texts", "N texts", page).splitlines()


@pytest.mark.full  # each keyword and backend is also tested in tests/plugins/grammar
def test_the_page_equals_the_generators_output(generator, tmp_path):
    written = tmp_path / "page.md"
    assert generator.main(["--walks", "1", "--out", str(written)]) == 0, "a backend ignores or blocks something"
    committed = (ROOT / "docs" / "grammar-support.md").read_text(encoding="utf-8")
    differing = set(rows(written.read_text(encoding="utf-8"))) ^ set(rows(committed))
    assert differing == set(), "out of date; `python benchmarks/grammar_support.py` writes it anew"
