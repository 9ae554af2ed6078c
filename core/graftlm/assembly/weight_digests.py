"""Hashes of whole weight files, remembered so that a restart need not read them again."""

import hashlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["WeightDigests", "user_cache_dir"]

logger = logging.getLogger(__name__)

_PART_BYTES = 64 * 2**20  # hashed by one thread; what is shorter than a part is not worth remembering
_PIECE_BYTES = 4 * 2**20  # read at once
_MAX_THREADS = 8
_SETTLED_S = 2.0  # a file changed so recently might change again without its times showing it


def user_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder of graftlm's files in the user's cache folder (XDG Base Directory specification)."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "graftlm"


class WeightDigests:
    """Hashes files by their whole content, in several threads.

    What large files hash to is kept in a JSON file, with what tells that a file is still the same: its real path,
    device, inode, size, and times of modification and of change, to the nanosecond. A JSON file that others may have
    written is not used. Without one, or when it cannot be written, files are read again.

    Args:
        memory: the JSON file; None to remember nothing. It and its folder are created private to the user.
        clock: seconds since 1970, comparable with files' times.
    """

    def __init__(self, memory: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._memory = memory
        self._clock = clock

    def of(self, files: Sequence[Path]) -> list[bytes]:
        """Return 32 bytes for each file.

        Raises:
            OSError: one cannot be read.
        """
        known = self._load()
        found = {file: self._remembered(known, file) for file in files}
        unread = [file for file, digest in found.items() if digest is None]
        before = {file: _identity(file) for file in unread}
        num_bytes = sum(_size(identity) for identity in before.values())
        if num_bytes >= _PART_BYTES:
            logger.info(
                "reading %.1f GB of weights whole, once, to know whose keys and values storage has", num_bytes / 1e9
            )
        began_s = self._clock()
        digests = _digests(unread, before)
        if num_bytes >= _PART_BYTES:
            logger.info("read the weights in %.1f s", self._clock() - began_s)
        fresh = {
            os.path.realpath(file): [before[file], digests[file].hex()]
            for file in unread
            if _size(before[file]) >= _PART_BYTES and self._is_settled(before[file], began_s, file)
        }
        if fresh and self._memory is not None:
            self._save(self._memory, {path: entry for path, entry in known.items() if os.path.exists(path)} | fresh)
        return [digests[file] if digest is None else digest for file, digest in found.items()]

    def _is_settled(self, identity: list[int], began_s: float, file: Path) -> bool:
        return _identity(file) == identity and max(identity[-2:]) / 1e9 < began_s - _SETTLED_S

    def _remembered(self, known: Mapping[str, object], file: Path) -> bytes | None:
        match known.get(os.path.realpath(file)):
            case [identity, str(digest)] if identity == _identity(file):
                try:
                    found = bytes.fromhex(digest)
                except ValueError:
                    return None
                return found if len(found) == 32 else None
        return None

    def _load(self) -> dict[str, object]:
        if self._memory is None:
            return {}
        try:
            with self._memory.open("rb") as stream:
                if _may_others_write(os.fstat(stream.fileno())):
                    logger.warning("%s could be written by others: it is not used", self._memory)
                    return {}
                content = json.load(stream)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _save(self, memory: Path, content: Mapping[str, object]) -> None:
        temporary = memory.with_name(f"{memory.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                json.dump(content, stream, indent=1)
            temporary.replace(memory)
        except OSError as error:
            logger.warning("cannot remember the hashes of the weights: %s; a restart reads the weights again", error)


def _may_others_write(status: os.stat_result) -> bool:
    """Whether a file's mode or owner lets other users write to it; Windows has neither."""
    if sys.platform == "win32":
        return False
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)


def _identity(file: Path) -> list[int]:
    """Return what changes with a file: device, inode, size, times of modification and of change."""
    status = file.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _size(identity: Sequence[int]) -> int:
    return identity[2]


def _digests(files: Sequence[Path], identities: Mapping[Path, Sequence[int]]) -> dict[Path, bytes]:
    """Return each file's hash: of its size, and of the hashes of its parts in order."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, "graftlm-weights") as threads:
        parts = {
            file: [threads.submit(_hash_part, file, at) for at in range(0, _size(identities[file]), _PART_BYTES)]
            for file in files
        }
        digests = {}
        for file, futures in parts.items():
            digest = hashlib.blake2b(_size(identities[file]).to_bytes(8, "little"), digest_size=32)
            for future in futures:
                digest.update(future.result())
            digests[file] = digest.digest()
    return digests


def _hash_part(file: Path, at: int) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    with file.open("rb", buffering=0) as stream:
        stream.seek(at)
        left = _PART_BYTES
        while left and (piece := stream.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
    return digest.digest()
