"""The programs of other projects' clients: each has its requirements and its line in the documentation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: Programs of the package `sglang`, whose version is in the Makefile.
SGLANG = {"sglang", "sglang_bench"}
#: Clients that `make test-clients` runs only if they are named.
ON_REQUEST = {"vllm_bench"}
PROGRAMS = sorted(path.name.removesuffix("_client.py") for path in HERE.glob("*_client.py"))


def pinned():
    """Return the version of each client, by the first line of its requirements."""
    files = {path.stem: path.read_text().splitlines()[0] for path in (HERE / "requirements").glob("*.txt")}
    return {name: dict([re.sub(r"\[.*\]", "", line).split("==")]) for name, line in files.items()}


def test_every_program_has_requirements_and_is_run_by_make():
    makefile = (ROOT / "Makefile").read_text()
    clients = re.search(r"^CLIENTS \?= ((?:\\\n|.)*)$", makefile, re.MULTILINE)[1].replace("\\\n", " ").split()
    assert set(PROGRAMS) <= pinned().keys() | SGLANG
    assert set(clients) == (pinned().keys() | SGLANG) - ON_REQUEST


def test_the_documentation_lists_exactly_the_clients_that_run():
    page = (ROOT / "docs" / "clients.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| ([\d.]+) \|", page, re.MULTILINE))
    sglang = re.search(r"sglang==([\d.]+)", (ROOT / "Makefile").read_text())[1]
    assert rows == {"sglang": sglang} | {name: version for pins in pinned().values() for name, version in pins.items()}


@pytest.mark.full
def test_the_programs_of_installed_clients_succeed(tmp_path):
    for name in ("openai", "anthropic"):
        (tmp_path / name / "bin").mkdir(parents=True)
        python = tmp_path / name / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    command = [sys.executable, str(HERE / "run.py"), "--environments", str(tmp_path), "openai", "anthropic"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "2 clients, 0 failures" in done.stdout
