"""The code of the docs page and the examples runs unchanged, on both backends if they name none."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

import graftlm.lang
from graftlm import set_default_backend
from graftlm.lang.chat_template import CHAT_TEMPLATES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lang.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples" / "lang"

#: script -> (program, its arguments)
PROGRAMS = {
    "essay_judge": ("judge", lambda m: (m.ESSAY, "trees in cities")),
    "self_consistency": ("vote", lambda m: ("What is 2 + 3?",)),
    "json_extraction": ("extract", lambda m: (m.TEXTS[0],)),
    "multi_turn_chat": ("chat", lambda m: (m.QUESTIONS,)),
    "tree_of_thought": ("solve", lambda m: (m.PROBLEM,)),
    "skeleton_of_thought": ("answer", lambda m: ("Why is it good to plant trees in a city?",)),
    "react_agent": ("agent", lambda m: ("How old will Mia be in 6 years?",)),
    "rag_pipeline": ("ask", lambda m: ("What is the capital of Norway?", m.BM25(m.PASSAGES))),
}


@pytest.fixture(autouse=True)
def no_default_backend():
    yield
    set_default_backend(None)


@pytest.fixture
def example(monkeypatch):
    """Return a function from an example's name to its module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in [*PROGRAMS, "example_backend"]:
        sys.modules.pop(name, None)


def test_the_code_of_the_docs_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 5
    scope = {}
    try:
        for i, block in enumerate(blocks):
            exec(compile(block, f"docs/lang.md, block {i + 1}", "exec"), scope)
        assert str(scope["compiled"].graph) in PAGE
    finally:
        scope["engine"].close()


def test_the_figures_about_compiling_are_the_measured_ones():
    rows = json.loads((ROOT / "benchmarks" / "results" / "lang_compile.json").read_text(encoding="utf-8"))
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.splitlines()}
    for row in rows:
        interpreted, compiled = row["requests"]
        assert f"| {interpreted:g} → {compiled:g} |" in lines[row["case"]]
        assert f"| {row['cpu_time_ratio']:.2f}x | {row['time_ratio']:.2f}x |" in lines[row["case"]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_gives_the_same_text_in_process_and_through_a_server(name, example, in_process, endpoint):
    module = example(name)
    program, arguments = PROGRAMS[name]
    states = [
        getattr(module, program).run(*arguments(module), temperature=0, backend=backend)
        for backend in (in_process, endpoint)
    ]
    assert states[0].text() == states[1].text()
    assert states[0].ret_value == states[1].ret_value


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_prints_text(name, example, server, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--url", server.url])
    example(name).main()
    assert len(capsys.readouterr().out) > 20


def test_every_example_is_tested_and_on_the_page():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {"example_backend"}
    assert scripts == set(PROGRAMS)
    assert all(f"`{name}.py`" in PAGE for name in scripts)


@pytest.mark.parametrize("name", graftlm.lang.__all__)
def test_every_public_name_is_on_the_page(name):
    assert re.search(rf"\b{name}\b", PAGE)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_every_named_chat_template_is_on_the_page(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", [name for name in vars(graftlm.lang.Backend) if not name.startswith("_")])
def test_every_method_of_a_backend_is_on_the_page(name):
    assert f"`{name}`" in PAGE
