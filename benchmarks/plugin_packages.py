"""Tests the packages of `graftlm plugins new` as a new user would use them: venv, pip, YAML, server, pytest.

For each family, the package is written, and installed with pip into a new virtual environment that can import this
environment's packages. Then `graftlm serve engine.yaml` answers a request, and the package's tests run.

    python benchmarks/plugin_packages.py
    python benchmarks/plugin_packages.py --family cache --family storage --json build/plugin_packages.json
"""

import argparse
import json
import os
import site
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from graftlm.cli.plugin_package import PluginPackage, write_plugin_package
from graftlm.registry import FAMILIES

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."

#: Script that runs in the package's environment: serves its configuration, sends a request and prints the answer.
SERVE = """
import json, sys, requests, yaml
from graftlm.testing.server_process import ServerProcess

config, request = yaml.safe_load(open("engine.yaml")), json.loads(sys.argv[1])
with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as server:
    response = requests.post(f"{server.url}/v1/chat/completions", json=request, timeout=120)
    response.raise_for_status()
    print(response.json()["choices"][0]["message"]["content"])
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one family's package, with times in seconds."""

    family: str
    install_s: float
    serve_s: float
    answer: str
    test_s: float
    tests: str


def environment_of(folder: Path) -> Path:
    """Create a virtual environment that can import the packages of this one; return the path of its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    seen = [*site.getsitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # Unlike a plain path, site.addsitedir also reads .pth files, such as the one of an editable install.
    lines = [f"import site; site.addsitedir({path!r})" for path in seen if path]
    (packages / "outer.pth").write_text("\n".join(lines) + "\n")
    return folder / "bin" / "python"


def run(command: list[str], folder: Path) -> tuple[str, float]:
    """Run a command; return its output, and the time in seconds.

    Raises:
        RuntimeError: the command failed.
    """
    begun_s = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout, time.monotonic() - begun_s


def request_for(package: PluginPackage) -> dict[str, Any]:
    """Return a chat request; for a logits processor, the request contains the processor's name."""
    request = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16}
    if package.family.key == "logits_processor":
        request["logits_processors"] = {package.name: {"penalty": 0}}
    return request


def try_family(family: str, folder: Path) -> Outcome:
    """Write, install, serve and test one family's package."""
    package = PluginPackage.of(family, f"sample-{family.replace('_', '-')}")
    written = write_plugin_package(package, folder / package.distribution)
    python = str(environment_of(folder / "venv"))
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet"]
    _, install_s = run([*pip, "--no-index", "--no-deps", "--no-build-isolation", str(written)], folder)
    config = yaml.safe_load((written / "engine.yaml").read_text())
    assert family == "logits_processor" or package.name in json.dumps(config)
    answer, serve_s = run([python, "-c", SERVE, json.dumps(request_for(package))], written)
    (written / package.module).rename(written / "sources")  # the tests must import the installed package
    tests, test_s = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], written)
    return Outcome(family, install_s, serve_s, answer.strip(), test_s, tests.strip().splitlines()[-1])


def main() -> None:
    """Try the families, print a table, and fail if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="repeatable; all when left out")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    arguments = parser.parse_args()
    outcomes = []
    print(f"{'family':<18}{'install s':>10}{'serve s':>10}{'test s':>10}  answer, tests")
    for family in arguments.family or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="graftlm-package-") as folder:
            outcome = try_family(family, Path(folder))
        outcomes.append(outcome)
        times = f"{outcome.install_s:>10.1f}{outcome.serve_s:>10.1f}{outcome.test_s:>10.1f}"
        print(f"{family:<18}{times}  {outcome.answer} {outcome.tests}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    wrong = [outcome.family for outcome in outcomes if outcome.answer != ANSWER]
    if wrong:
        sys.exit(f"these did not answer {ANSWER!r}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
