"""Checks that a tag fits the version and the changelog: `python tools/check_release.py v0.2.0 [--notes]`."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ReleaseError", "main", "release_notes"]

_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


class ReleaseError(Exception):
    """Tag, version and changelog do not agree."""


def main(root: Path, arguments: Sequence[str]) -> int:
    """Check a tag; with `--notes`, print the changelog's section. Return the exit status."""
    try:
        tag, *options = arguments
        notes = release_notes(root, tag)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    print(notes if "--notes" in options else f"{tag} fits the version and CHANGELOG.md")
    return 0


def release_notes(root: Path, tag: str) -> str:
    """Return the changelog's section for the version of a tag.

    Args:
        root: folder of the repository.
        tag: "v" followed by the version.

    Raises:
        ReleaseError: graftlm has another version, or CHANGELOG.md has no section for it, or marks it as unreleased.
    """
    found = _VERSION.search((root / "core" / "graftlm" / "__init__.py").read_text(encoding="utf-8"))
    version: str | None = found[1] if found else None
    if version is None or tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag!r}, but graftlm.__version__ is {version!r}; expected the tag 'v{version}'")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)}\b([^\n]*)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None:
        raise ReleaseError(f"CHANGELOG.md has no section '## {version}'")
    if "unreleased" in section[1]:
        raise ReleaseError(f"CHANGELOG.md calls {version} unreleased; write the date instead")
    return section[2].strip()


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent, sys.argv[1:]))
