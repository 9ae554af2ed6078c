"""The examples of the README work."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from graftlm.config import EngineConfig
from graftlm.types import RequestOutput, SamplingParams

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINE_PAGE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("code", [code for code in blocks(README, "python") if "openai" not in code])
def test_the_readmes_python_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert "2 + 3 = 5." in capsys.readouterr().out


@pytest.mark.parametrize("text", blocks(README, "yaml"))
def test_the_readmes_yaml_is_a_configuration(text, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    assert EngineConfig.load(file).cache.page_size == 16


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_the_readmes_links_exist(path):
    assert (ROOT / path).exists()


def test_the_readmes_tree_names_existing_modules_completely():
    tree = README.split("## What is here")[1].split("## ")[0]
    package = ROOT / "core" / "graftlm"
    named = set(re.findall(r"\b([a-z_]+)/", tree)) | set(re.findall(r"\b([a-z_]+)\.py", tree))
    there = {p.name for p in package.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert there <= named


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_sampling_parameter_is_documented(name):
    assert f"`{name}`" in ENGINE_PAGE


@pytest.mark.parametrize("name", [name for name in dir(RequestOutput) if not name.startswith("_")])
def test_every_output_attribute_is_documented(name):
    assert f"`{name}`" in ENGINE_PAGE
