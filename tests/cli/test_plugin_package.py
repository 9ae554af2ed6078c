"""What `graftlm plugins new` writes: packages that install, are listed, keep their contracts and pass their tests."""

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
    """Run `graftlm plugins new` for every family: family -> the commands that it prints."""
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
    """A package of every family: family -> the folder that its printed `cd` leads to."""
    return {family: Path(shlex.split(steps[1])[1]) for family, steps in next_steps.items()}


def run(command, site, cwd=None):
    """Run a command that finds what is installed in `site`, and return what it printed."""
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
    """Return the commands between those that install the package and those that run its tests and serve."""
    _, _, *checks, test, serve = steps
    assert (test, serve) == ("pytest", "graftlm serve engine.yaml")  # the other tests here run these two
    return checks


@pytest.mark.parametrize("family", FAMILIES)
def test_new_prints_how_to_install_check_test_and_serve_as_the_readme_does(next_steps, packages, family):
    install, change_folder, *others = next_steps[family]
    extra = tomllib.loads((packages[family] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert shlex.split(install) == ["pip", "install", "-e", f"{packages[family]}[test]"]
    assert "test" in extra
    assert shlex.split(change_folder) == ["cd", str(packages[family])]
    assert any(f"graftlm plugins check {family}/{name_of(family)}" in check for check in checks_of(next_steps[family]))
    readme = (packages[family] / "README.md").read_text()
    assert all(f"    {step}\n" in readme for step in others)


@pytest.mark.full  # the packages' own tests, below, run the same kits
def test_every_command_that_new_prints_does_what_it_says(next_steps, packages, site, tmp_path):
    commands = [
        (shutil.copytree(packages[family], tmp_path / family), checks_of(steps)) for family, steps in next_steps.items()
    ]
    # The server of the other test has no storage, and a second check finds the file of the first.
    again = [*checks_of(next_steps["storage"]), "graftlm generate --config engine.yaml --max-tokens 1 Hello"]
    commands.append((tmp_path / "storage", again))
    printed = run([sys.executable, "-c", RUN_EACH, json.dumps(commands, default=str)], site)
    summaries = [line for line in printed.splitlines() if " passed, " in line]
    assert len(summaries) == len(FAMILIES) + 1
    assert all(" passed, 0 failed, " in line for line in summaries), summaries


def test_the_packages_own_tests_pass(packages, site):
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",  # which loads for seconds
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


def test_printed_folders_are_quoted_for_a_shell(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = command(capsys, "new", "cache", "mine", "--path", "o'hare $HOME")
    install, change_folder = (shlex.split(line) for line in out.splitlines()[1:3])
    assert (install[-1], change_folder) == ("o'hare $HOME[test]", ["cd", "o'hare $HOME"])


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


def test_an_unknown_family_is_refused_with_the_nearest(capsys):
    status, _, err = command(capsys, "new", "evictoin", "calm")
    assert status == 2
    assert "Did you mean 'eviction'?" in err
