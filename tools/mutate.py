"""Mutation tests: `python tools/mutate.py` applies each listed change to a copy of the code; a test must then fail.

For each mutation, the lists tests/mutations/*.toml name the file, a piece of its text, the replacement, and the tests
that must fail. Each mutation is tried in a copy of the tracked files, never in the working tree.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

__all__ = ["Mutation", "load", "main", "try_all"]

_ROOT = Path(__file__).parents[1]
_LISTS = "tests/mutations"
_LIMIT_S = 900


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change to the code that a test must notice.

    Attributes:
        name: short description of what breaks.
        path: path of the file from the repository's root.
        old, new: text that occurs once in the file, and its replacement.
        tests: arguments of pytest: files, or test ids.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Change the file below `root`; return its previous text.

        Raises:
            ValueError: `old` does not occur exactly once, or `new` equals it.
        """
        file = root / self.path
        text = file.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(
                f"mutation {self.name!r}: got {count} occurrences of {self.old!r} in {self.path}, expected 1 and "
                f"another text in its place; adapt the entry in {_LISTS}"
            )
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text


def load(folder: Path) -> list[Mutation]:
    """Read the lists in a folder, in the order of their names."""
    entries = [entry for file in sorted(folder.glob("*.toml")) for entry in tomllib.loads(file.read_text())["mutation"]]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the selected mutations and print a line for each; return 1 if one survived."""
    parser = argparse.ArgumentParser(description="Try each mutation of the code that tests/mutations lists.")
    parser.add_argument("-k", metavar="TEXT", default="", help="only mutations with this in their name or path")
    parser.add_argument("-j", metavar="N", type=int, default=os.cpu_count() or 1, help="copies to work in at a time")
    given = parser.parse_args(arguments)
    chosen = [m for m in load(_ROOT / _LISTS) if given.k in m.name or given.k in m.path]
    with tempfile.TemporaryDirectory() as folder:
        copies = [_copy(Path(folder) / str(i)) for i in range(max(1, min(given.j, len(chosen))))]
        return try_all(chosen, copies)


def try_all(mutations: Sequence[Mutation], copies: Sequence[Path]) -> int:
    """Try mutations in parallel, one per copy of the repository at the same time; print the outcomes.

    Returns: 1 if a mutation survived, or if the tests fail without a mutation; else 0.
    """
    every_test = sorted({test for mutation in mutations for test in mutation.tests})
    if (status := _pytest(copies[0], every_test)) != 0:
        print(f"the tests fail without a mutation: pytest ended with {status}")
        return 1
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def attempt(mutation: Mutation) -> str:
        copy, start = free.get(), time.monotonic()
        try:
            text = mutation.apply(copy)
            try:
                status = _pytest(copy, mutation.tests)
                outcome = {0: "SURVIVED", 1: "caught", None: "TIMED OUT"}.get(status, f"PYTEST {status}")
            finally:
                (copy / mutation.path).write_text(text, encoding="utf-8")
        finally:
            free.put(copy)
        print(f"{outcome}  {time.monotonic() - start:5.1f} s  {mutation.path}: {mutation.name}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        outcomes = list(pool.map(attempt, mutations))
    num_caught = outcomes.count("caught")
    print(f"{num_caught} of {len(outcomes)} mutations caught")
    return 0 if num_caught == len(outcomes) else 1


def _copy(target: Path) -> Path:
    """Copy the tracked files as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, check=True, capture_output=True).stdout
    for name in listed.decode().split("\0"):
        if name and (_ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, target / name)
    return target


def _pytest(copy: Path, tests: Sequence[str]) -> int | None:
    """Run tests in a copy of the repository, with the packages of the copy, until one fails.

    Returns: pytest's exit status; None after the time limit, because a timeout proves nothing on a busy machine.
    """
    packages = [copy / "core", *sorted((copy / "plugins").iterdir())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(
            command, cwd=copy, env=environment, check=False, capture_output=True, timeout=_LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
