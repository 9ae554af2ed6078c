"""What is stored of files and batches, and what clients see of them."""

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

#: States in which a batch has work left.
ACTIVE = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class FileBody(msgspec.Struct, frozen=True, kw_only=True):
    """A file: its content is beside it."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """Files, the newest first."""

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
    """What is wrong with a line of the input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with the input."""

    object: str = "list"
    data: Sequence[BatchProblem]


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, as clients see it."""

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
    """A batch, as it is stored.

    Attributes:
        output_id, error_id: of the files that results are appended to; clients see them when the batch has ended.
        output_seconds: seconds until the result files expire; None: never.
    """

    body: BatchBody
    output_id: str
    error_id: str
    output_seconds: int | None = None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """Batches, the newest first."""

    object: str = "list"
    data: Sequence[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


def new_record_id(prefix: str) -> str:
    """Draw an id; later ones are greater."""
    return f"{prefix}-{time.time_ns():016x}{secrets.token_hex(8)}"


def save_record(path: Path, record: msgspec.Struct) -> None:
    """Write a record: after a crash, the file has the old content or the new one."""
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load_record(path: Path, kind: type[T]) -> T | None:
    """Return a record; None if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
