"""Reads a checkpoint's JSON files; errors have the file's name."""

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from graftlm.errors import CheckpointError
from graftlm.shortening import shortened

__all__ = ["listed", "listing", "named_file", "read_json", "read_json_value"]

_NAMES_SHOWN = 12
_MAX_BYTES: Final = 256 << 20  # an index of a million tensors has a third of this size
#: Maximum length of a file name in file systems, in bytes.
_MAX_NAME_BYTES: Final = 255
_SHOWN_CHARS: Final = 200


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: as in `read_json_value`, or the file has no object.
    """
    value = read_json_value(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must be a JSON object, got {type(value).__name__}")
    return value


def read_json_value(file: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, is not a regular file, is too large, is not JSON or is nested too
            deeply.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe may never end
            raise CheckpointError(f"{file} is not a regular file")
        if status.st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} has {status.st_size:,} bytes, expected at most {_MAX_BYTES:,}")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # also raised for a number of more than 4,300 digits
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} cannot be read: its lists and objects are nested too deeply") from error


def named_file(folder: Path, name: object, said: str) -> Path:
    """Return the path of a file or folder whose name was read from a checkpoint's file.

    Args:
        name: the name in the checkpoint's file.
        said: place of the name, as the start of an error message.

    Raises:
        CheckpointError: the value cannot be the name of a file in `folder`. The existence of the file is not checked.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or Path(name).name != name
        or "\0" in name
        or "\\" in name
        or len(name.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES
        or any("\ud800" <= character <= "\udfff" for character in name)
    ):
        shown = shortened(repr(name), _SHOWN_CHARS)
        raise CheckpointError(f"{said}: expected the name of a file in the same folder, got {shown}")
    return folder / name


def listing(folder: Path) -> str:
    """Return the names of a folder's entries, for a message."""
    return listed(sorted(entry.name for entry in folder.iterdir())) or "nothing"


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of further names, for a message."""
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
