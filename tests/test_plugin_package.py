"""What `graftlm plugins new` writes: packages that install, are listed, keep their contracts and pass their tests."""

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import yaml

from graftlm import EngineConfig
from graftlm.cli import main
from graftlm.contracts import API_VERSION
from graftlm.errors import ConfigError
from graftlm.plugin_package import PluginPackage, write_plugin_package
from graftlm.registry import FAMILIES
from graftlm.testing.server_process import ServerProcess

TEMPLATES = Path(__file__).parent.parent / "core" / "graftlm" / "plugin_templates"


def name_of(family):
    return f"sample-{family.replace('_', '-')}"


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A package of every family: family -> its folder."""
    folder = tmp_path_factory.mktemp("packages")
    return {
        family: write_plugin_package(PluginPackage.of(family, name_of(family)), folder / family) for family in FAMILIES
    }


def run(command, site, cwd=None):
    """Run a command that finds what is installed in `site`, and return what it printed."""
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=cwd or site, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BUILD = """
import os, sys
from hatchling.build import build_wheel
for folder in sys.argv[2:]:
    os.chdir(folder)
    build_wheel(sys.argv[1])
"""


@pytest.fixture(scope="module")
def site(packages, tmp_path_factory):
    """A folder into which pip has installed all of them: wheels that their own build backend made."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    run([sys.executable, "-c", BUILD, str(wheels), *map(str, packages.values())], site)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    run([*pip, "--target", str(site), *map(str, sorted(wheels.iterdir()))], site)
    return site


def test_every_package_is_listed_by_its_entry_point(site):
    listing = json.loads(run([sys.executable, "-c", "from graftlm.cli import main; main(['plugins', '--json'])"], site))
    found = {entry["family"]: entry for entry in listing["providers"] if entry["name"].startswith("sample-")}
    assert {family: (entry["name"], entry["distribution"], entry["version"]) for family, entry in found.items()} == {
        family: (name_of(family), f"graftlm-{name_of(family)}", "0.1.0") for family in FAMILIES
    }
    assert listing["failures"] == []


def test_the_packages_own_tests_pass(packages, site):
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-c",
        str(packages["cache"] / "pyproject.toml"),
    ]
    tests = [str(folder / "tests") for folder in packages.values()]
    printed = run([sys.executable, "-m", "pytest", *options, "--rootdir", str(packages["cache"]), *tests], site)
    assert " passed" in printed
    assert "failed" not in printed


def merged(packages, families):
    """Return one configuration that selects what those of several packages do."""
    config = {}
    for family in reversed(families):  # the cache after its eviction strategy, which names a cache, too
        selected = yaml.safe_load((packages[family] / "engine.yaml").read_text())
        for section, values in selected.items():
            if section == "model" and not isinstance(values, dict):
                continue
            config.setdefault(section, {}).update(values)
    return config


def test_a_server_answers_with_all_of_them(packages, site, tmp_path):
    families = [family for family in FAMILIES if family != "storage"]  # it goes with another cache
    config = merged(packages, families)
    assert json.dumps(config).count("sample-") == len(families) - 1  # a request names the logits processor
    request = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    environment = {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    with ServerProcess(config, environment=environment) as server:

        def answer(**more):
            response = requests.post(f"{server.url}/v1/chat/completions", json=request | more, timeout=60)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["message"]["content"]

        paris = "The capital of France is Paris."
        assert answer() == paris
        assert answer(choice=["Lima", "Oslo"]) in ("Lima", "Oslo")
        assert answer(logits_processors={"sample-logits-processor": {"penalty": 0}}) == paris


@pytest.mark.parametrize("family", FAMILIES)
def test_its_configuration_is_one(packages, family):
    EngineConfig.load(packages[family] / "engine.yaml")


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_templates_names_is_left(packages, family):
    for file in packages[family].rglob("*"):
        assert "new_plugin" not in file.name
        if file.is_file():
            text = file.read_text()
            assert not [word for word in ("new-plugin", "new_plugin", "FAMILY", "CONTRACT") if word in text], file


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_are_written_for_this_api(family):
    tree = ast.parse((TEMPLATES / family / "graftlm_new_plugin" / "__init__.py").read_text())
    (version,) = (node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "api_version")
    assert ast.literal_eval(version) == API_VERSION


@pytest.mark.parametrize(
    "name", ["", "Cache", "my_cache", "-a", "a-", "a--b", "1a", "auto", "a" * 31, "a.b", "ä", "../x", "a b"]
)
def test_a_name_that_no_package_can_have_is_refused(name):
    with pytest.raises(ConfigError, match="lower case letters, digits and single '-'"):
        PluginPackage.of("cache", name)


def test_nothing_is_written_over(tmp_path):
    package = PluginPackage.of("eviction", "twice")
    write_plugin_package(package, tmp_path / "here")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match="is there already"):
        write_plugin_package(package, tmp_path / "here")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_a_module_that_is_installed_is_not_hidden(tmp_path):
    with pytest.raises(ConfigError, match="'graftlm_cache' is installed already"):
        write_plugin_package(PluginPackage.of("cache", "cache"), tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        write_plugin_package(PluginPackage.of("cache", "any"), tmp_path / "file" / "below")


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(("plugins", *arguments))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_command_says_what_to_do_next(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = command(capsys, "new", "logits-processor", "calm")
    assert status == 0
    assert "graftlm plugins check logits_processor/calm" in out
    assert (tmp_path / "graftlm-calm" / "graftlm_calm" / "processor.py").exists()
    assert command(capsys, "new", "cache", "mine", "--path", "elsewhere")[0] == 0
    assert (tmp_path / "elsewhere" / "pyproject.toml").exists()


def test_a_name_that_an_installed_plugin_has_is_refused_unless_forced(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = command(capsys, "new", "cache", "radix")
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert "The prefix cache 'radix' is provided by graftlm " in err
    assert command(capsys, "new", "cache", "radix", "--force")[0] == 0


def test_a_models_next_steps_write_the_checkpoint_that_checking_needs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = command(capsys, "new", "model", "small")
    steps = [line.strip() for line in out.splitlines()]
    assert steps[3:5] == [
        "python -m graftlm_small.tiny_checkpoint tiny",
        "graftlm plugins check model/small --checkpoint tiny",
    ]
    readme = (tmp_path / "graftlm-small" / "README.md").read_text()
    assert all(f"    {step}\n" in readme for step in steps[3:])
    monkeypatch.chdir(tmp_path / "graftlm-small")
    monkeypatch.syspath_prepend(str(tmp_path / "graftlm-small"))
    monkeypatch.setattr(sys, "argv", steps[3].split()[2:])
    runpy.run_module(sys.argv[0], run_name="__main__")
    status, out, _ = command(capsys, *steps[4].split()[2:], "--module", "graftlm_small")
    assert (status, out.splitlines()[-1].split(",")[1]) == (0, " 0 failed")


def test_an_unknown_family_is_refused_with_the_nearest(capsys):
    status, _, err = command(capsys, "new", "evictoin", "calm")
    assert status == 2
    assert "Did you mean 'eviction'?" in err
