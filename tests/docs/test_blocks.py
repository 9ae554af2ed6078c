"""Every block of the docs runs, loads or is parsed."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from graftlm import Engine, set_default_backend
from graftlm.cli.entry import app
from graftlm.config import EngineConfig
from graftlm.testing import Conformance, run_conformance
from graftlm_grammar.ebnf import read_ebnf
from graftlm_grammar.lark_ebnf import as_ebnf

from .pages import BLOCKS, OTHERS, PAGES, ROOT, blocks_of, command_lines

#: Pages whose Python is run by another test, which also checks its results.
RUN_ELSEWHERE = {
    "lang.md": "tests/lang/test_pages.py",
    "lora.md": "tests/engine/test_lora.py",
    "structured-generation.md": "tests/docs/test_structured_generation.py",
}
PYTHON = [block for block in BLOCKS if block.language == "python"]
RUNNABLE = sorted({block.page for block in PYTHON if block.needs is None} - set(RUN_ELSEWHERE))
#: Languages whose blocks are run, loaded or parsed; text is not.
LANGUAGES = {"bash", "json", "lark", "py", "python", "text", "toml", "yaml"}
#: Sizes and seeds that limit a kit of the docs to a fraction of a second; all its tests still run.
FEW = {
    "page_size": (4,),
    "dtype": ("float32",),
    "head_dim": (16,),
    "group": (2,),
    "window": (7,),
    "seed": (0, 1),
    "block_bytes": (1000,),
    "chunk_len": (3,),
    "enforced": (False, True),
}
#: Sentences that a kit cannot check on an example, and the statement on the page about it.
MAY_SKIP = {
    "tutorials/prefix-cache.md": ("does not pin",),
    "tutorials/attention-backend.md": (
        "does not claim to support soft caps",
        "does not claim to support values that are a prefix of the keys",
        "does not claim to support attention sinks",
        "does not claim to support caches in 8 bits",
    ),
    "families/storage.md": ("the kit cannot ",),
}


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "lark"], ids=str)
def test_every_lark_grammar_is_accepted(block):
    assert "root" in read_ebnf(as_ebnf(block.text))


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_has_a_language_that_is_tested(page):
    fences = re.findall(r"^ *```+(.*)$", PAGES[page].read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks_of(page))
    assert {block.language for block in blocks_of(page)} <= LANGUAGES


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory with a configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.yaml").write_text("model: demo\nmemory: {kv_tokens: 2048}\n", encoding="utf-8")
    return tmp_path


#: Their kits start several processes for each test.
SLOW = {"families/executor.md"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.full) if page in SLOW else page for page in RUNNABLE]
)
def test_the_python_of_a_page_runs_and_its_plugins_keep_their_contracts(page, folder):
    names = {"__name__": "docs_page"}
    try:
        for block in blocks_of(page):
            if block.language == "python" and block.needs is None:
                exec(compile(block.text, str(block), "exec"), names)
        kits = [value for value in names.values() if isinstance(value, type) and issubclass(value, Conformance)]
        for kit in (kit for kit in kits if kit.__module__ == "docs_page"):
            assert_keeps_contract(kit, MAY_SKIP.get(page, ()))
    finally:
        set_default_backend(None)
        if "engine" in names:
            names["engine"].close()


def assert_keeps_contract(kit, may_skip):
    few = {name: FEW.get(name, values) for name, values in kit.parameters.items()}
    results = run_conformance(type(kit.__name__, (kit,), {"parameters": few, "max_examples": 3}))
    assert [result for result in results if result.error] == []
    skipped = [result.skipped for result in results if result.skipped]
    assert all(any(said in reason for said in may_skip) for reason in skipped), skipped
    assert len(skipped) < len(results)


@pytest.mark.parametrize(("page", "test"), RUN_ELSEWHERE.items())
def test_pages_that_another_test_runs_are_named_in_that_test(page, test):
    assert page in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", [block for block in PYTHON if block.needs], ids=str)
def test_python_that_cannot_run_here_compiles_and_uses_existing_names(block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "engine":
            assert hasattr(Engine, node.attr), f"an Engine has no {node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module.startswith("graftlm"):
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            packages = [name.partition(".")[0] for name in names]
            assert all(importlib.util.find_spec(name) or name in block.needs for name in packages)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_yaml_is_a_configuration(block, tmp_path):
    if block.title:  # it names another file
        assert yaml.safe_load(block.text)
        return
    file = tmp_path / "engine.yaml"
    file.write_text(block.text, encoding="utf-8")
    EngineConfig.load(file, environment={"GRAFTLM_API_KEY": "a key"})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("json", "toml")], ids=str)
def test_json_and_toml_can_be_parsed(block):
    import tomllib

    assert json.loads(block.text) if block.language == "json" else tomllib.loads(block.text)


LINES = [
    (path.name, words)
    for path in [*PAGES.values(), *OTHERS]
    for words in command_lines(path.read_text(encoding="utf-8"), "graftlm")
]


@pytest.mark.parametrize(("page", "words"), LINES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_command_line_is_accepted_by_the_command(page, words):
    parse(words)


def parse(words, command=None, name="graftlm"):
    """Parse as the command line does, without running anything."""
    command = typer.main.get_command(app) if command is None else command
    inner = getattr(command, "commands", {})
    at = next((i for i, word in enumerate(words) if word in inner), len(words))
    if words[:at]:  # a text that only names the command has no further words
        context = command.make_context(name, words[:at])
        if inner:
            assert [*context._protected_args, *context.args] == [], f"no such command of {name}"
    if at < len(words):
        parse(words[at + 1 :], inner[words[at]], f"{name} {words[at]}")


@pytest.mark.parametrize("words", [["serve", "--nope"], ["plugins", "chek"], ["bench", "serve", "--request-rate"]])
def test_a_refused_command_line_fails_this_check(words):
    with pytest.raises(Exception, match=r"(?i)no such|requires an argument"):
        parse(words)


MAKE = {words[0] for path in [*PAGES.values(), *OTHERS] for words in command_lines(path.read_text("utf-8"), "make")}


@pytest.mark.parametrize("target", sorted(MAKE))
def test_a_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


SCRIPTS = {
    words[0]
    for path in [*PAGES.values(), *OTHERS]
    for words in command_lines(path.read_text(encoding="utf-8"), "python")
    if words and words[0].endswith(".py")
}


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_script_exists(script):
    assert (ROOT / script).is_file() or list(ROOT.glob(f"examples/**/{Path(script).name}"))


@pytest.mark.parametrize("block", [block for block in BLOCKS if "curl " in block.text], ids=str)
def test_curl_examples_use_existing_paths_and_valid_bodies(block):
    from docs_reference.endpoints import api_description

    words = shlex.split(block.text.replace("\\\n", " "))
    (url,) = [word for word in words if word.startswith("http")]
    assert "/" + url.split("/", 3)[3] in api_description()["paths"]
    if "-d" in words:
        assert json.loads(words[words.index("-d") + 1])
