"""The records of files and batches, in the stored form and in the form for clients."""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

__all__ = [
    "ACTIVE",
    "BatchBody",
    "BatchList",
    "BatchProblem",
    "BatchProblems",
    "BatchRecord",
    "DeletedFile",
    "FileBody",
    "FileList",
    "RequestCounts",
    "load_record",
    "new_record_id",
    "save_record",
]

T = TypeVar("T", bound=msgspec.Struct)

#: States of a batch that has not ended.
ACTIVE = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class FileBody(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a file; the content is stored separately."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A list of files, the newest first."""

    object: str = "list"
    data: Sequence[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was deleted."""

    id: str
    object: str = "file"
    deleted: bool = True


class BatchProblem(msgspec.Struct, frozen=True):
    """A problem in a batch's input. It may concern a single line or the whole input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(msgspec.Struct, frozen=True, kw_only=True):
    """The problems of an input."""

    object: str = "list"
    data: Sequence[BatchProblem]


class RequestCounts(msgspec.Struct, frozen=True):
    """The numbers of requests in a batch: all, completed and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in the form for clients."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: Mapping[str, Any] | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in the stored form.

    Attributes:
        output_id, error_id: ids of the files to which results are appended. Clients can read the files only after the
            batch has ended.
        output_seconds: seconds until the result files expire; None if they never expire.
    """

    body: BatchBody
    output_id: str
    error_id: str
    output_seconds: int | None = None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """A list of batches, the newest first."""

    object: str = "list"
    data: Sequence[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


def new_record_id(prefix: str) -> str:
    """Return a new id. Ids increase with time, so they can be sorted."""
    return f"{prefix}-{time.time_ns():016x}{secrets.token_hex(8)}"


def save_record(path: Path, record: msgspec.Struct) -> None:
    """Write a record atomically: after a crash, the file has either the old or the new content."""
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load_record(path: Path, kind: type[T]) -> T | None:
    """Return a record; None if the file does not exist."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
