"""Computes hashes of whole weight files, and stores them so that a restart need not read the weights again."""

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

_PART_BYTES = 64 * 2**20  # size in bytes of a part, which one thread hashes; the hashes of smaller files are not stored
_PIECE_BYTES = 4 * 2**20  # size in bytes of one read
_MAX_THREADS = 8
_SETTLED_S = 2.0  # seconds; a file that changed more recently might change again without a change of its times


def user_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder of graftlm's files in the user's cache folder (XDG Base Directory specification)."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification says that relative paths are ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "graftlm"


class WeightDigests:
    """Hashes the whole content of files, in several threads.

    The hashes of large files are stored in a JSON file, together with properties that show whether a file has changed:
    real path, device, inode, size, and times of modification and of change in nanoseconds. A JSON file that other users
    may have written is not used. Without a JSON file, the weight files are read again.

    Args:
        store: the JSON file; None: hashes are not stored. The file and its folder are created private to the user.
        clock: function that returns Unix time in seconds, comparable with the times of files.
    """

    def __init__(self, store: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def of(self, files: Sequence[Path]) -> list[bytes]:
        """Return the hash, 32 bytes, of each file.

        Raises:
            OSError: a file cannot be read.
        """
        known = self._load()
        found = {file: self._stored_digest(known, file) for file in files}
        unread = [file for file, digest in found.items() if digest is None]
        before = {file: _identity(file) for file in unread}
        num_bytes = sum(_size(identity) for identity in before.values())
        if num_bytes >= _PART_BYTES:
            logger.info(
                "hashing %.1f GB of weights, once, because the names of stored KV blocks contain the hash",
                num_bytes / 1e9,
            )
        began_s = self._clock()
        digests = _digests(unread, before)
        if num_bytes >= _PART_BYTES:
            logger.info("hashed the weights in %.1f s", self._clock() - began_s)
        fresh = {
            os.path.realpath(file): [before[file], digests[file].hex()]
            for file in unread
            if _size(before[file]) >= _PART_BYTES and self._is_settled(before[file], began_s, file)
        }
        if fresh and self._store is not None:
            self._save(self._store, {path: entry for path, entry in known.items() if os.path.exists(path)} | fresh)
        return [digests[file] if digest is None else digest for file, digest in found.items()]

    def _is_settled(self, identity: list[int], began_s: float, file: Path) -> bool:
        return _identity(file) == identity and max(identity[-2:]) / 1e9 < began_s - _SETTLED_S

    def _stored_digest(self, known: Mapping[str, object], file: Path) -> bytes | None:
        match known.get(os.path.realpath(file)):
            case [identity, str(digest)] if identity == _identity(file):
                try:
                    found = bytes.fromhex(digest)
                except ValueError:
                    return None
                return found if len(found) == 32 else None
        return None

    def _load(self) -> dict[str, object]:
        if self._store is None:
            return {}
        try:
            with self._store.open("rb") as stream:
                if _may_others_write(os.fstat(stream.fileno())):
                    logger.warning("%s is not used, because other users can write to it", self._store)
                    return {}
                content = json.load(stream)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _save(self, store: Path, content: Mapping[str, object]) -> None:
        temporary = store.with_name(f"{store.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            store.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                json.dump(content, stream, indent=1)
            temporary.replace(store)
        except OSError as error:
            logger.warning("cannot store the hashes of the weights: %s; a restart hashes the weights again", error)


def _may_others_write(status: os.stat_result) -> bool:
    """Return whether a file's mode or owner permits other users to write to it; False on Windows."""
    if sys.platform == "win32":
        return False
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)


def _identity(file: Path) -> list[int]:
    """Return the properties that show whether a file has changed: device, inode, size and both times in nanoseconds."""
    status = file.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _size(identity: Sequence[int]) -> int:
    return identity[2]


def _digests(files: Sequence[Path], identities: Mapping[Path, Sequence[int]]) -> dict[Path, bytes]:
    """Return file -> hash. A file's hash is a hash of its size and of the hashes of its parts, in order."""
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
