"""Blocks of keys and values as files in one folder; they survive a restart, and replicas share them.

A block is one file. It is written under a temporary name and then renamed, so it appears complete or not at all. Other
processes may add and remove files at any time, so blocks are looked up in the folder. An index in memory counts bytes
for the size limit. A walk through the folder renews the index, at the latest after `max_bytes / 20` written bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, ByteSize, Field

from graftlm.contracts import KVStorage, Options, StorageContext, StorageStats
from graftlm.errors import ConfigError
from graftlm_cache.block_file import BlockFormat, ReadResult
from graftlm_cache.block_folder import BlockFolder, Entry, block_name, list_blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FileStorage", "FileStorageOptions"]

_logger = logging.getLogger(__name__)

#: 1/20 of `max_bytes` is the most that is written between two walks through the folder. It is also what an eviction
#: frees in addition to the bytes that it must free.
_SLACK = 20
_TOUCH_S = 60.0  # minimum number of seconds between two updates of a file's time
_ABANDONED_S = 600.0  # a temporary file older than this, in seconds, is removed as abandoned


_NO_VECTOR_IO = "cannot be used: it needs os.writev, which only Linux and macOS have"


def _lacks_vector_io() -> bool:
    return not hasattr(os, "writev")  # Windows


def _expanded(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path must not contain a NUL character")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be expanded: {error} Use a path without ~.") from error


class FileStorageOptions(Options):
    """The folder of the files and its size limit."""

    path: Annotated[
        Path,
        AfterValidator(_expanded),
        Field(
            description="Folder of the files; created if missing. Replicas share it, and a restarted engine uses it "
            "again. `~` is the home directory."
        ),
    ]
    max_bytes: Annotated[
        ByteSize,
        Field(
            gt=0,
            description="Maximum size of the folder for all models together, in bytes or with a unit, such as 10GiB.",
        ),
    ] = ByteSize(10 << 30)
    fsync: Annotated[
        bool,
        Field(description="Wait for the disk after every write. Otherwise, a power failure may lose recent blocks."),
    ] = False

    def machine_obstacles(self) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) if the folder cannot be used or `max_bytes` is larger than the disk."""
        if _lacks_vector_io():
            yield "path", _NO_VECTOR_IO
            return
        folder = self.path.absolute()
        try:
            while not folder.exists() and folder != folder.parent:
                folder = folder.parent
            if not folder.is_dir():
                yield "path", f"{folder} is not a folder"
            elif not os.access(folder, os.W_OK | os.X_OK):
                yield "path", f"{folder} cannot be written"
            elif "max_bytes" in self.model_fields_set and self.max_bytes > (
                disk_bytes := shutil.disk_usage(folder).total
            ):
                yield (
                    "max_bytes",
                    f"is {self.max_bytes:,} bytes, but the disk of {folder} has only {disk_bytes:,} bytes",
                )
        except (OSError, ValueError) as error:
            yield "path", f"cannot be used: {error}"


class FileStorage(KVStorage):
    """A KV storage with one file per block. At its size limit, it removes the least recently used files.

    Args:
        options: folder and size limit.
        context: fingerprint of the model, and size of a block.
        clock: clock in seconds since 1970, comparable with the times of files.

    Raises:
        ConfigError: the limit is smaller than one block, or the operating system is Windows.
    """

    def __init__(
        self, options: FileStorageOptions, context: StorageContext, clock: Callable[[], float] = time.time
    ) -> None:
        if _lacks_vector_io():
            raise ConfigError(f"The KV storage 'file' {_NO_VECTOR_IO}.")
        self._root = str(options.path.absolute())
        self._format = BlockFormat(context.fingerprint, context.block_bytes)
        self._limit_bytes = int(options.max_bytes)
        self._slack_bytes = self._limit_bytes // _SLACK // self._format.file_bytes * self._format.file_bytes
        self._fsync = options.fsync
        self._clock = clock
        if self._limit_bytes < self._format.file_bytes:
            raise ConfigError(
                f"max_bytes of the KV storage 'file' is {self._limit_bytes}, but one block needs "
                f"{self._format.file_bytes} bytes; set a larger max_bytes."
            )
        self._walking = threading.Lock()  # held during walks and removals; acquired before _lock
        self._lock = threading.Lock()  # held at most for one os.stat; guards the attributes below
        self._folder = BlockFolder(self._format.folder)
        self._reserved_bytes = 0  # room reserved for writers that have not finished
        self._unwalked_bytes = 0  # written since the last walk
        self._temporary_bytes = 0  # unfinished files of other writers, at the last walk
        self._writer_id = secrets.token_hex(4)
        self._counts: Counter[str] = Counter()
        self._logged: set[tuple[str, int | None]] = set()
        with self._walking:
            self._walk()

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys whose blocks are stored."""
        for count, key in enumerate(keys):
            name = block_name(self._format.folder, key)
            with self._lock:
                known = name in self._folder
            if not known and not self._adopt(name):
                return count
        return len(keys)

    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Read one block into `out`, uint8 [block_bytes]. Return False if it is missing, damaged or unreadable."""
        name = block_name(self._format.folder, key)
        result = self._read(name, key, out)
        with self._lock:
            self._counts["hits" if result is ReadResult.INTACT else "misses"] += 1
        if result is ReadResult.INTACT:
            self._use(name)
            return True
        if result is not None:
            self._drop(name, result)
        return False

    def put(self, key: bytes, data: NDArray[np.uint8]) -> bool:
        """Store one block, unless it is stored already. Return False if the write failed or there is no room."""
        name = block_name(self._format.folder, key)
        if self._adopt(name):
            return True
        if not self._reserve():
            return False
        try:
            self._write(name, key, data)
        except OSError as error:
            self._fail("write", error)
            return False
        else:
            self._stored(name)
            return True
        finally:
            with self._lock:
                self._reserved_bytes -= self._format.file_bytes

    def clear(self) -> None:
        """Remove every file of this fingerprint."""
        with self._walking:
            try:
                listing = list_blocks(self._root, self._format.folder)
            except OSError as error:
                self._fail("list", error)
                return
            for name in listing.blocks:
                self._remove(name)
            self._walk()

    def stats(self) -> StorageStats:
        """Return counts; `num_blocks` and `num_bytes` count the files of this fingerprint, headers included."""
        with self._lock:
            return StorageStats(num_blocks=self._folder.num_own, num_bytes=self._folder.own_bytes, **dict(self._counts))

    def close(self) -> None:
        """Do nothing: every write is finished when `put` returns, and no file stays open."""

    def _read(self, name: str, key: bytes, out: NDArray[np.uint8]) -> ReadResult | None:
        """Read a file. Return None if there is no such file or the read failed."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW  # opening a pipe would otherwise block
        try:
            fd = os.open(self._path(name), flags)
        except FileNotFoundError:
            self._forget(name)
            return None
        except OSError as error:
            self._fail("read", error)
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            return self._format.read(fd, key, out)
        except OSError as error:
            self._fail("read", error)
            return None
        finally:
            os.close(fd)

    def _write(self, name: str, key: bytes, data: NDArray[np.uint8]) -> None:
        path = self._path(name)
        temporary = f"{path.removesuffix('.kv')}.{self._writer_id}-{secrets.token_hex(4)}.tmp"
        fd = _create(temporary)
        try:
            try:
                self._format.write(fd, key, data)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            self._unlink(temporary)
            raise
        if self._fsync:
            self._sync_folders(name)

    def _stored(self, name: str) -> None:
        entry = Entry(self._format.file_bytes, self._clock())
        with self._lock:
            self._folder.add(name, entry)
            self._unwalked_bytes += entry.num_bytes
            self._counts["stored"] += 1

    def _adopt(self, name: str) -> bool:
        """Return whether the file exists, and add it to the index if another process wrote it.

        Effects: removes a file of the wrong size.
        """
        try:
            status = os.stat(self._path(name), follow_symlinks=False)
        except FileNotFoundError:
            self._forget(name)
            return False
        except OSError as error:
            self._fail("read", error)
            return False
        if status.st_size != self._format.file_bytes or not stat.S_ISREG(status.st_mode):
            self._drop(name, ReadResult.CORRUPT)
            return False
        with self._lock:
            if name not in self._folder:
                self._folder.add(name, Entry(status.st_size, min(status.st_mtime, self._clock())))
        return True

    def _use(self, name: str) -> None:
        """Record a hit in the index, and at most once per `_TOUCH_S` in the file's time, which other processes read."""
        now = self._clock()
        with self._lock:
            before = self._folder.last_use_s(name)
            if name in self._folder or self._exists(name):
                self._folder.add(name, Entry(self._format.file_bytes, now))
        if now - before < _TOUCH_S:
            return
        try:
            os.utime(self._path(name), (now, now))
        except FileNotFoundError:
            self._forget(name)
        except OSError as error:
            self._fail("touch", error)

    def _forget(self, name: str) -> None:
        """Remove a missing file from the index, unless a writer has created it again in the meantime.

        A writer first renames its file and then, under the lock, adds it to the index. So if the file appears after
        this check, its writer adds it to the index after this removal.
        """
        with self._lock:
            if not self._exists(name):
                self._folder.remove(name)

    def _exists(self, name: str) -> bool:
        return os.path.exists(self._path(name))

    def _reserve(self) -> bool:
        """Reserve room for one file until its writer has finished. Return False if no room can be made."""
        need = self._format.file_bytes
        with self._walking:
            with self._lock:
                due = self._unwalked_bytes + need > self._slack_bytes
                if not due and self._excess(need) <= 0:
                    self._reserved_bytes += need
                    return True
            self._walk()
            self._evict(need)
            with self._lock:
                fits = self._excess(need) <= 0
                self._reserved_bytes += need if fits else 0
            if not fits:
                self._fail("remove", OSError(errno.ENOSPC, "cannot make room below max_bytes"))
            return fits

    def _excess(self, need: int) -> int:
        taken = self._folder.total_bytes + self._temporary_bytes + self._reserved_bytes
        return taken + need - self._limit_bytes

    def _evict(self, need: int) -> None:
        with self._lock:
            excess = self._excess(need)
            victims = self._folder.oldest(excess + self._slack_bytes) if excess > 0 else []
        for name in victims:
            if self._remove(name):
                with self._lock:
                    self._counts["evicted"] += 1

    def _walk(self) -> None:
        """Renew the index from the folder, and remove abandoned temporary files."""
        began = self._clock()
        try:
            listing = list_blocks(self._root)
        except OSError as error:
            self._fail("list", error)
            return
        with self._lock:
            self._folder.replace(listing.blocks, since_s=began)
            self._unwalked_bytes = 0
        temporary_bytes = 0
        for name, entry in listing.temporary.items():
            if began - entry.last_use_s > _ABANDONED_S and self._unlink(self._path(name)) is not None:
                continue
            if f".{self._writer_id}-" not in name:  # room is reserved for this object's own files
                temporary_bytes += entry.num_bytes
        with self._lock:
            self._temporary_bytes = temporary_bytes

    def _drop(self, name: str, found: ReadResult) -> None:
        """Remove a corrupt or foreign file, and count it."""
        with self._lock:
            self._counts[found.value] += 1
        self._remove(name)

    def _remove(self, name: str) -> bool:
        """Remove a file. Return whether this call removed it."""
        removed = self._unlink(self._path(name))
        if removed is not None:
            self._forget(name)
        return bool(removed)

    def _unlink(self, path: str) -> bool | None:
        """Remove a file. Return False if it did not exist, None if the removal failed."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._fail("remove", error)
            return None
        return True

    def _fail(self, action: str, error: OSError) -> None:
        """Count a failure; log it if it is the first of its kind."""
        with self._lock:
            self._counts["failures"] += 1
            kind = (action, error.errno)
            is_new = kind not in self._logged
            self._logged.add(kind)
        if is_new:
            _logger.warning(
                "KV storage %s: cannot %s: %s. Further failures of this kind are counted and not logged.",
                self._root,
                action,
                error,
            )

    def _sync_folders(self, name: str) -> None:
        """Write a file's folders to the disk, because any of them may be new."""
        kind, shard, _ = name.split("/")
        for folder in (f"{kind}/{shard}", kind, "."):
            fd = os.open(self._path(folder), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _create(path: str) -> int:
    """Open a new file for writing, and create its folder if necessary. Return the file descriptor.

    Only the file's owner may read it, because prompts can be reconstructed from keys and values.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o600)
