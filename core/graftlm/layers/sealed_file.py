"""Checks the integrity of a file that is run as code, and which users may write to the file.

`hatch_build.py` loads this file by its path, in an environment without graftlm's dependencies. The file therefore
imports only the standard library.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["find_damage", "find_flaw", "find_other_writers", "seal"]

#: The seal at the end of a file: magic, number of bytes before the seal (little-endian), their SHA-256. The dynamic
#: loader ignores it.
_MAGIC: Final = b"graftlm\0"
_SIZE_BYTES: Final = 8
_SEAL_BYTES: Final = len(_MAGIC) + _SIZE_BYTES + hashlib.sha256().digest_size
_ROOT_UID: Final = 0


def seal(file: Path) -> None:
    """Append a seal to a file and flush it to disk. Other users may read the file afterwards, for any umask."""
    mark = _seal_of(file.read_bytes())
    with file.open("ab") as stream:
        stream.write(mark)
        stream.flush()
        os.fsync(stream.fileno())
    file.chmod(0o755)


def find_flaw(file: Path) -> str | None:
    """Return the reason not to run a file, in the form "is ...": damaged, without a seal, or writable by other users.

    Returns: None for a file that is unchanged since `seal`.

    Raises:
        OSError: the file cannot be read; a FileNotFoundError if it does not exist.
    """
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    writers = find_other_writers(status, os.getuid())
    if writers is not None:
        return f"is not trusted: {writers}"
    return find_damage(file.read_bytes())


def find_damage(content: bytes) -> str | None:
    """Return the damage of a file's content since `seal`, in the form "is ..."; None: it is unchanged.

    The check is needed because loading an incomplete library may end the process.
    """
    body, mark = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    if mark.startswith(_MAGIC) and mark == _seal_of(body):
        return None
    return f"is damaged, or was written by an older graftlm: its {len(content):,} bytes do not end with their SHA-256"


def find_other_writers(status: os.stat_result, uid: int) -> str | None:
    """Return as text which users other than `uid` and root may write to a file or folder; None: no other user.

    Args:
        status: status of the file or folder.
        uid: id of the user who would run the file.
    """
    if status.st_uid not in (_ROOT_UID, uid):
        return f"it belongs to user {status.st_uid}, neither to this user ({uid}) nor to root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.filemode(status.st_mode)} lets other users write to it"
    return None


def _seal_of(body: bytes) -> bytes:
    return _MAGIC + len(body).to_bytes(_SIZE_BYTES, "little") + hashlib.sha256(body).digest()
