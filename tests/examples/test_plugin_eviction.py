import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin_eviction"
GRAFTLM = [sys.executable, "-c", "from graftlm.cli import main; main()"]


def run(command: list[str], site: Path) -> str:
    """Run a command that finds the packages in `site`, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example was installed from its source."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]
    run([*pip, *options, str(EXAMPLE)], site)
    return site


def test_an_installed_plugin_is_listed_with_its_distribution(site: Path):
    listing = json.loads(run([*GRAFTLM, "plugins", "--json"], site))
    (entry,) = (entry for entry in listing["providers"] if entry["name"] == "costly-last")
    assert (entry["family"], entry["distribution"], entry["version"]) == ("eviction", "graftlm-costly-last", "0.1.0")
    assert entry["unavailable"] is None
    assert listing["failures"] == []


def test_the_plugins_tests_pass(site: Path):
    plugins = ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
    pytest_options = [*plugins, "--rootdir", str(EXAMPLE), "-c", str(EXAMPLE / "pyproject.toml"), "-q"]
    printed = run([sys.executable, "-m", "pytest", *pytest_options, str(EXAMPLE / "tests")], site)
    assert " passed" in printed
    assert "skipped" not in printed
