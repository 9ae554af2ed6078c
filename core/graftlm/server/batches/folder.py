"""The folder of files and batches. Only one server may use it at a time."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from graftlm.errors import ConfigError
from graftlm.server.batches.records import BatchBody, BatchRecord, FileBody, load_record, save_record

__all__ = ["BatchFolder"]

T = TypeVar("T", bound=msgspec.Struct)

_ID: Final = re.compile(r"(file|batch)-[0-9a-f]{32}")


class BatchFolder:
    """Reads and writes records, and returns the paths of content files.

        files/file-....json    the record of a file        files/file-....data    its content
        batches/batch-....json the record of a batch

    A content file without a record is incomplete: an interrupted upload, or the results of a running batch.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Create the folder, readable only by its owner, and lock it.

        Raises:
            ConfigError: the folder cannot be created or is in use.
        """
        import fcntl  # exists only on POSIX, like the server

        self._files = path / "files"
        self._batches = path / "batches"
        self._clock = clock
        try:
            for folder in (path, self._files, self._batches):
                folder.mkdir(mode=0o700, parents=folder == path, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(f"server.files.path: another server uses {path}. Set another folder.") from error
        except OSError as error:
            raise ConfigError(f"server.files.path: cannot use {path}: {error.strerror or error}.") from error

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    @property
    def num_bytes(self) -> int:
        """The total size of all contents."""
        return sum(path.stat().st_size for path in self._files.glob("*.data"))

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / f"{_checked(file_id)}.data"

    def file(self, file_id: str) -> FileBody | None:
        """Return the record of a file; None if it does not exist or has expired."""
        if _ID.fullmatch(file_id) is None:
            return None
        record = load_record(self._files / f"{file_id}.json", FileBody)
        if record is not None and record.expires_at is not None and record.expires_at <= self._clock():
            self.remove_file(file_id)
            return None
        return record

    def files(self) -> list[FileBody]:
        """Return the records of all files, the newest first. Removes expired files."""
        found = [self.file(path.stem) for path in self._files.glob("*.json")]
        return sorted((file for file in found if file is not None), key=_age, reverse=True)

    def save_file(self, record: FileBody) -> None:
        """Store the record of a file whose content is complete."""
        save_record(self._files / f"{_checked(record.id)}.json", record)

    def remove_file(self, file_id: str) -> None:
        """Remove a file and its content. A missing file is ignored."""
        (self._files / f"{_checked(file_id)}.json").unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    def remove_incomplete(self) -> None:
        """Remove content files without a record, such as interrupted uploads, except the results of batches."""
        known = {file_id for record in self.batches() for file_id in (record.output_id, record.error_id)}
        for path in self._files.glob("*.data"):
            if path.stem not in known and not path.with_suffix(".json").exists():
                path.unlink()

    def batch(self, batch_id: str) -> BatchRecord | None:
        """Return a batch; None if it does not exist."""
        if _ID.fullmatch(batch_id) is None:
            return None
        return load_record(self._batches / f"{batch_id}.json", BatchRecord)

    def batches(self) -> Iterator[BatchRecord]:
        """Yield all batches, the newest first."""
        found = [load_record(path, BatchRecord) for path in self._batches.glob("*.json")]
        yield from sorted(
            (record for record in found if record is not None), key=lambda it: _age(it.body), reverse=True
        )

    def save_batch(self, record: BatchRecord) -> None:
        """Store a batch."""
        save_record(self._batches / f"{_checked(record.body.id)}.json", record)


def _checked(record_id: str) -> str:
    assert _ID.fullmatch(record_id), record_id
    return record_id


def _age(record: FileBody | BatchBody) -> tuple[int, str]:
    return record.created_at, record.id
