"""The observer packages under examples/ pass their own tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = (EXAMPLES / "observer_csv", EXAMPLES / "observer_opentelemetry")


@pytest.mark.full
def test_the_packages_own_tests_pass():
    paths = os.pathsep.join([*map(str, PACKAGES), os.environ.get("PYTHONPATH", "")])
    settings = ["-c", str(PACKAGES[0] / "pyproject.toml"), "-o", "filterwarnings=error"]
    loops = ["-o", "asyncio_default_fixture_loop_scope=function"]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--import-mode=importlib", *settings, *loops]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(package / "tests") for package in PACKAGES)],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
