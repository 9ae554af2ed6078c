"""Checks the tracked files for problems that no other linter finds: `python tools/check_sources.py` prints them."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["conflict_markers", "has_tests", "main", "problems"]

_CONFLICT_MARKER = re.compile(r"(?:<{7} |>{7} |\|{7} |={7}\r?$)")


def main(root: Path) -> int:
    """Print the problems of a repository's tracked files; return the exit status."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout
    paths = [root / name for name in listed.decode().split("\0") if name]
    found = [str(problem) for problem in problems([path for path in paths if path.is_file()], root)]
    print("\n".join(found) or f"{len(paths)} tracked files: no conflict marker, no test file without a test")
    return 1 if found else 0


def problems(paths: Sequence[Path], root: Path) -> Iterator[str]:
    """Yield the problems in files, one line each: path from `root`, line number, problem. Binary files have none."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = path.relative_to(root)
        for number in conflict_markers(text):
            yield f"{name}:{number}: conflict marker"
        if path.match("test_*.py") and not _has_tests_or_is_no_python(text):
            yield f"{name}:1: pytest collects no test here: restore the tests or delete the file"


def conflict_markers(text: str) -> list[int]:
    """Return the line numbers of conflict markers that a merge left, counted from 1."""
    return [number for number, line in enumerate(text.split("\n"), 1) if _CONFLICT_MARKER.match(line)]


def has_tests(source: str) -> bool:
    """Return whether pytest collects tests from a module: functions `test*`, or classes `Test*` with tests or bases.

    Raises:
        SyntaxError: the source is not valid Python.
    """
    return any(_is_collected(node) for node in _statements(ast.parse(source).body))


def _has_tests_or_is_no_python(source: str) -> bool:
    try:
        return has_tests(source)
    except SyntaxError:  # ruff reports it
        return True


def _is_collected(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name.startswith("test")
    if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
        # A class with a base other than object, such as a kit, may inherit tests; the base is not searched for them.
        inherits = any(not (isinstance(base, ast.Name) and base.id == "object") for base in node.bases)
        return inherits or any(_is_collected(inner) for inner in _statements(node.body))
    if isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return any(name.startswith(("test_", "Test")) for name in names)
    return False


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a body runs, including those in `if`, `try`, `for` and `with` blocks."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(node, name, ()):
                    yield from _statements([inner] if isinstance(inner, ast.stmt) else inner.body)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
