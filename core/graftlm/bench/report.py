"""The saved result of a run."""

import os
import platform
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from graftlm import __version__
from graftlm.bench.records import RequestRecord
from graftlm.bench.settings import BenchSettings
from graftlm.bench.summary import Summary
from graftlm.bench.target import Target
from graftlm.errors import ConfigError

__all__ = ["SCHEMA_VERSION", "Environment", "Report", "check_writable", "load_report", "save_json", "save_report"]

#: Raised when a field goes or changes its meaning; new fields keep it.
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the client ran, and when.

    Attributes:
        started_at: ISO 8601, UTC.
        host_cpus: of the client's machine.
    """

    started_at: str
    graftlm: str
    python: str
    aiohttp: str
    numpy: str
    platform: str
    host_cpus: int | None

    @classmethod
    def now(cls) -> "Environment":
        """Return this process's."""
        return cls(
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            graftlm=__version__,
            python=platform.python_version(),
            aiohttp=version("aiohttp"),
            numpy=version("numpy"),
            platform=platform.platform(),
            host_cpus=os.cpu_count(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All there is to know of a run: docs/benchmarking.md has every field.

    Attributes:
        label: what the run was, in the user's words.
        warnings: what a reader must know before believing the figures.
    """

    schema_version: int = SCHEMA_VERSION
    label: str | None
    settings: BenchSettings
    environment: Environment
    server: Target
    warnings: list[str]
    summary: Summary
    requests: list[RequestRecord]


class _Version(msgspec.Struct):
    schema_version: int


def check_writable(path: Path) -> None:
    """Find out, before a long run, whether its report can be written; the folder is made.

    Raises:
        ConfigError: it cannot.
    """
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from error
    if not existed:
        path.unlink()  # a run that fails leaves no empty file


def save_report(report: Report, path: Path) -> None:
    """Write a report as JSON. Chunks are kept when its settings say so.

    Raises:
        ConfigError: it cannot be written.
    """
    if not report.settings.save_chunks:
        requests = [replace(record, gaps_s=None, chunk_tokens=None) for record in report.requests]
        report = replace(report, requests=requests)
    save_json(report, path)


def save_json(result: object, path: Path) -> None:
    """Write a result as JSON: dataclasses, mappings and sequences of plain values.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from error


def load_report(path: Path) -> Report:
    """Read a report.

    Raises:
        ConfigError: it cannot be read, is none, or of another schema version.
    """
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=_Version).schema_version
        if found != SCHEMA_VERSION:
            raise ConfigError(f"{path} has schema_version {found}; this graftlm reads {SCHEMA_VERSION}")
        return msgspec.json.decode(data, type=Report)
    except OSError as error:
        raise ConfigError(f"cannot read the report {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no report of graftlm bench serve: {error}") from error
