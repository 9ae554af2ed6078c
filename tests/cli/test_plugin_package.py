"""The packages that `graftlm plugins new` writes can be installed, are listed, keep their contracts and pass their
tests.
"""

import ast
import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import requests
import yaml

from graftlm import EngineConfig
from graftlm.cli import main
from graftlm.cli.plugin_package import PluginPackage, write_plugin_package
from graftlm.contracts import API_VERSION
from graftlm.errors import ConfigError
from graftlm.registry import FAMILIES
from graftlm.testing.server_process import ServerProcess

TEMPLATES = Path(__file__).parents[2] / "core" / "graftlm" / "plugin_templates"


def name_of(family):
    return f"sample-{family.replace('_', '-')}"


@pytest.fixture(scope="module")
def next_steps(tmp_path_factory):
    """Run `graftlm plugins new` for every family: family -> the printed commands."""
    folder = tmp_path_factory.mktemp("packages")
    steps = {}
    for family in FAMILIES:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as done:
            main(("plugins", "new", family, name_of(family), "--path", str(folder / family)))
        assert not done.value.code
        steps[family] = [line.strip() for line in printed.getvalue().splitlines() if line.startswith("  ")]
    return steps


@pytest.fixture(scope="module")
def packages(next_steps):
    """A package for every family: family -> the folder in the printed `cd`."""
    return {family: Path(shlex.split(steps[1])[1]) for family, steps in next_steps.items()}


def run(command, site, cwd=None):
    """Run a command with the packages installed in `site`, and return its output."""
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
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
    """A folder into which pip has installed all packages, as wheels that their own build backend made."""
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


RUN_EACH = """
import json, os, runpy, shlex, sys
from graftlm.cli import main
for folder, commands in json.loads(sys.argv[1]):
    os.chdir(folder)
    for command in commands:
        print("$", command, flush=True)
        program, *arguments = shlex.split(command)
        try:
            if program == "python":
                sys.argv = arguments[1:]
                runpy.run_module(arguments[1], run_name="__main__")
            else:
                main(arguments)
        except SystemExit as end:
            if end.code:
                sys.exit(f"exit status {end.code} of: {command}")
"""


def checks_of(steps):
    """Return the printed commands without installation, tests and server."""
    _, _, *checks, test, serve = steps
    assert (test, serve) == ("pytest", "graftlm serve engine.yaml")  # other tests in this file run these two
    return checks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_printed_next_steps_equal_those_in_the_readme(next_steps, packages, family):
    install, change_folder, *others = next_steps[family]
    extra = tomllib.loads((packages[family] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert shlex.split(install) == ["pip", "install", "-e", f"{packages[family]}[test]"]
    assert "test" in extra
    assert shlex.split(change_folder) == ["cd", str(packages[family])]
    assert any(f"graftlm plugins check {family}/{name_of(family)}" in check for check in checks_of(next_steps[family]))
    readme = (packages[family] / "README.md").read_text()
    assert all(f"    {step}\n" in readme for step in others)


@pytest.mark.full  # the packages' own tests, below, run the same kits
def test_every_printed_command_works(next_steps, packages, site, tmp_path):
    commands = [
        (shutil.copytree(packages[family], tmp_path / family), checks_of(steps)) for family, steps in next_steps.items()
    ]
    # The server test does not include the storage, and a second check would find the file of the first.
    again = [*checks_of(next_steps["storage"]), "graftlm generate --config engine.yaml --max-tokens 1 Hello"]
    commands.append((tmp_path / "storage", again))
    printed = run([sys.executable, "-c", RUN_EACH, json.dumps(commands, default=str)], site)
    summaries = [line for line in printed.splitlines() if " passed, " in line]
    assert len(summaries) == len(FAMILIES) + 1
    assert all(" passed, 0 failed, " in line for line in summaries), summaries


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(("eviction", "scheduling"), id="two"),
        pytest.param(tuple(FAMILIES), id="all", marks=pytest.mark.full),
    ],
)
def test_the_tests_of_the_packages_pass(packages, site, families):
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",  # without this plugin, which takes seconds to load
        "--import-mode=importlib",
        "-c",
        str(packages["cache"] / "pyproject.toml"),
    ]
    tests = [str(packages[family] / "tests") for family in families]
    printed = run([sys.executable, "-m", "pytest", *options, "--rootdir", str(packages["cache"]), *tests], site)
    assert " passed" in printed
    assert "failed" not in printed


def merged(packages, families):
    """Return one configuration that selects the plugins of several packages."""
    config = {}
    # the cache comes after its eviction strategy, whose configuration names a cache too
    for family in reversed(families):
        selected = yaml.safe_load((packages[family] / "engine.yaml").read_text())
        for section, values in selected.items():
            if section == "model" and not isinstance(values, dict):
                continue
            config.setdefault(section, {}).update(values)
    return config


@pytest.mark.full  # in the quick set, each package's tests run, and the engine selects each plugin of the repository
def test_a_server_runs_with_all_packages_together(packages, site, tmp_path):
    families = [family for family in FAMILIES if family != "storage"]  # the storage needs another cache
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
def test_the_packages_engine_yaml_is_a_valid_configuration(packages, family):
    EngineConfig.load(packages[family] / "engine.yaml")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_placeholder_of_the_template_is_left(packages, family):
    for file in packages[family].rglob("*"):
        assert "new_plugin" not in file.name
        if file.is_file():
            text = file.read_text()
            assert not [word for word in ("new-plugin", "new_plugin", "FAMILY", "CONTRACT") if word in text], file


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_have_the_current_api_version(family):
    tree = ast.parse((TEMPLATES / family / "graftlm_new_plugin" / "__init__.py").read_text())
    (version,) = (node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "api_version")
    assert ast.literal_eval(version) == API_VERSION


@pytest.mark.parametrize(
    "name", ["", "Cache", "my_cache", "-a", "a-", "a--b", "1a", "auto", "a" * 31, "a.b", "ä", "../x", "a b"]
)
def test_an_invalid_package_name_is_refused(name):
    with pytest.raises(ConfigError, match="lower-case letters, digits and single '-'"):
        PluginPackage.of("cache", name)


def test_existing_files_are_not_overwritten(tmp_path):
    package = PluginPackage.of("eviction", "twice")
    write_plugin_package(package, tmp_path / "here")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match="exists already"):
        write_plugin_package(package, tmp_path / "here")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_a_name_that_would_hide_an_installed_module_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'graftlm_cache' is already installed"):
        write_plugin_package(PluginPackage.of("cache", "cache"), tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created"):
        write_plugin_package(PluginPackage.of("cache", "any"), tmp_path / "file" / "below")


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(("plugins", *arguments))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_printed_folders_are_quoted_for_a_shell(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = command(capsys, "new", "cache", "mine", "--path", "o'hare $HOME")
    install, change_folder = (shlex.split(line) for line in out.splitlines()[1:3])
    assert (install[-1], change_folder) == ("o'hare $HOME[test]", ["cd", "o'hare $HOME"])


def test_the_command_prints_the_next_steps(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = command(capsys, "new", "logits-processor", "calm")
    assert status == 0
    assert "graftlm plugins check logits_processor/calm" in out
    assert (tmp_path / "graftlm-calm" / "graftlm_calm" / "processor.py").exists()
    assert command(capsys, "new", "cache", "mine", "--path", "elsewhere")[0] == 0
    assert (tmp_path / "elsewhere" / "pyproject.toml").exists()


def test_a_name_of_an_installed_plugin_is_refused_without_force(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = command(capsys, "new", "cache", "radix")
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert "The prefix cache 'radix' is already provided by graftlm " in err
    assert command(capsys, "new", "cache", "radix", "--force")[0] == 0


def test_the_next_steps_of_a_model_write_a_checkpoint_for_the_check(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = command(capsys, "new", "model", "small")
    steps = [line.strip() for line in out.splitlines()]
    assert steps[3:5] == [
        "python -m graftlm_small.tiny_checkpoint tiny",
        "graftlm plugins check model/small --checkpoint tiny",
    ]
    readme = (tmp_path / "graftlm-small" / "README.md").read_text()
    assert all(f"    {step}\n" in readme for step in steps[3:])


def test_an_unknown_family_is_refused_with_the_nearest_name(capsys):
    status, _, err = command(capsys, "new", "evictoin", "calm")
    assert status == 2
    assert "Did you mean 'eviction'?" in err
