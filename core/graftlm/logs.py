"""The log format of all processes: one line per record on standard error, as text or as JSON."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO, TypeAlias

__all__ = ["JsonFormatter", "LogFormat", "TextFormatter", "configure_logging", "current_settings", "request_id_var"]

LogFormat: TypeAlias = Literal["text", "json"]

#: Id of the HTTP request that is being handled; it is added to log lines.
request_id_var: ContextVar[str | None] = ContextVar("graftlm_request_id", default=None)

#: Standard attributes of log records; a caller set all other attributes with `extra=`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line.

    Keys: ts (ISO 8601, UTC), level, logger, process, message; request_id and exc if they exist; then the keys of
    `extra`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
        line: dict[str, Any] = {
            "ts": _moment(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self.process,
            "message": record.getMessage(),
        }
        request_id = _request_id(record)
        if request_id is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exc"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        extra = {key: value for key, value in vars(record).items() if key not in _STANDARD and key not in line}
        return json.dumps(line | extra, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as text: a line with time, level, process and message, and a traceback below it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line, with a traceback below it."""
        clock = _moment(record).astimezone().strftime("%H:%M:%S")
        request_id = _request_id(record)
        suffix = "" if request_id is None else f" [{request_id}]"
        lines = [f"{clock} {record.levelname:<7} {self.process}: {record.getMessage()}{suffix}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        if record.stack_info:
            lines.append(self.formatStack(record.stack_info))
        return "\n".join(lines)


def configure_logging(format: LogFormat, level: str, process: str, stream: TextIO | None = None) -> None:
    """Configure the log of this process.

    Args:
        format: "text" or "json".
        level: lowest level to write: "debug", "info", "warning" or "error".
        process: name of this process, in every line.
        stream: output stream; None: standard error.

    Effects: replaces the handlers of the root logger and of uvicorn.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # At info and debug, these loggers write every start and connection, which graftlm already logs.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def current_settings() -> tuple[LogFormat, str, str | None]:
    """Return format, level and process name of this process's log, for a process that it starts.

    The name is None if a program has configured the log.
    """
    level = logging.getLevelName(logging.getLogger("graftlm").getEffectiveLevel()).lower()
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            return "json", level, handler.formatter.process
        if isinstance(handler.formatter, TextFormatter):
            return "text", level, handler.formatter.process
    return "text", level, None


def _moment(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _request_id(record: logging.LogRecord) -> str | None:
    """Return the record's request id; without one, the id of the HTTP request that is being handled."""
    given = getattr(record, "request_id", None)
    return request_id_var.get() if given is None else str(given)
