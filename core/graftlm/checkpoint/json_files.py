"""A checkpoint's JSON files, read or refused by name."""

import json
from pathlib import Path
from typing import Any

from graftlm.errors import CheckpointError

__all__ = ["listing", "read_json"]

_NAMES_SHOWN = 12


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        CheckpointError: it cannot be read, is not JSON, is nested too deeply, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} cannot be read: its lists and objects are nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def listing(folder: Path) -> str:
    """Return the names of a folder's entries, for a message."""
    names = sorted(entry.name for entry in folder.iterdir())
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more if names else "nothing"
