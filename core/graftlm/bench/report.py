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

#: Version of the report's format, increased when a field is removed or changes its meaning.
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Environment:
    """The client's machine and software, and the time of the run.

    Attributes:
        started_at: start of the run, in ISO 8601 and UTC.
        graftlm, python, aiohttp, numpy: version numbers.
        platform: operating system.
        host_cpus: number of CPUs of the client's machine; None: unknown.
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
        """Return the environment of this process."""
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
    """The complete result of a run; docs/benchmarking.md describes every field.

    Attributes:
        schema_version: version of this format.
        label: the user's description of the run.
        settings: the settings of the run.
        environment: the client's machine and software.
        server: the measured server.
        warnings: reasons why the figures may be misleading.
        summary: the figures.
        requests: a record for each request.
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
    """Check before a long run that its report can be written.

    Effects: creates the report's folder.

    Raises:
        ConfigError: the report cannot be written.
    """
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from error
    if not existed:
        path.unlink()  # otherwise a run that fails would leave an empty file


def save_report(report: Report, path: Path) -> None:
    """Write a report as JSON. The file contains the chunks only if `settings.save_chunks` is set.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not report.settings.save_chunks:
        requests = [replace(record, gaps_s=None, chunk_tokens=None) for record in report.requests]
        report = replace(report, requests=requests)
    save_json(report, path)


def save_json(result: object, path: Path) -> None:
    """Write a result as JSON. The result may consist of dataclasses, mappings and sequences of plain values.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from error


def load_report(path: Path) -> Report:
    """Read a report.

    Raises:
        ConfigError: the file cannot be read, is not a report, or has another schema version.
    """
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=_Version).schema_version
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"{path}: schema_version must be {SCHEMA_VERSION}, got {found}; repeat the measurement with this "
                "version of graftlm"
            )
        return msgspec.json.decode(data, type=Report)
    except OSError as error:
        raise ConfigError(f"cannot read the report {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a report of graftlm bench serve: {error}") from error
