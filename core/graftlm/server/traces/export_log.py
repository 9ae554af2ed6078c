"""Reduces OpenTelemetry's log lines about failed exports to one line per minute, and drops those about headers."""

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["ExportLog"]

#: The logger of the exporter's errors, and the logger of the queue of spans.
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_QUEUE: Final = "opentelemetry.sdk._shared_internal"
#: The loggers of warnings about malformed headers, which contain a header's whole text. A client could fill the log.
_HEADERS: Final = (
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
    "opentelemetry.baggage.propagation",
)
_INTERVAL_S: Final = 60.0


class ExportLog(logging.Filter):
    """Lets one record per minute pass. The record contains the last error of the exporter.

    Args:
        endpoint: URL of the collector, for the log.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._clock = clock
        self._next_s: float | None = None
        self._last_error = ""

    def install(self) -> None:
        """Filter the records of OpenTelemetry's exporter, of its queue of spans, and about headers of requests.

        Effects: changes loggers of OpenTelemetry, until `remove` is called.
        """
        for name in (_EXPORTER, _QUEUE):
            logging.getLogger(name).addFilter(self)
        for name in _HEADERS:
            logging.getLogger(name).addFilter(_is_error)

    def remove(self) -> None:
        """Undo `install`."""
        for name in (_EXPORTER, _QUEUE):
            logging.getLogger(name).removeFilter(self)
        for name in _HEADERS:
            logging.getLogger(name).removeFilter(_is_error)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged. If so, its message is replaced."""
        if record.name == _EXPORTER:
            self._last_error = record.getMessage()
        reason = self._last_error or record.getMessage()
        now_s = self._clock()
        if self._next_s is not None and now_s < self._next_s:
            return False
        self._next_s = now_s + _INTERVAL_S
        record.msg, record.args = "traces cannot be exported to %s, and spans may be lost: %s", (self._endpoint, reason)
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
