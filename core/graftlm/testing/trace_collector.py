"""A collector for OpenTelemetry traces that runs in a thread. It needs the extra `graftlm[otlp]`."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from graftlm.testing.server_process import wait_until

__all__ = ["CollectedSpan", "TraceCollector"]


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """One span that a collector received.

    Attributes:
        parent_id: hexadecimal id of the parent span; "" if the span has no parent.
        kind: "SERVER", "INTERNAL" and so on.
        status: "UNSET", "OK" or "ERROR".
        resource: attributes of the process that created the span.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    begin_ns: int
    end_ns: int
    status: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    trace_state: str

    @property
    def seconds(self) -> float:
        """The duration."""
        return (self.end_ns - self.begin_ns) / 1e9


class TraceCollector:
    """Receives OTLP over HTTP on a free port, and decodes the spans.

        with TraceCollector() as collector:
            start_server(traces={"endpoint": collector.url})
            collector.wait_for("POST /v1/completions")

    Args:
        decodes: whether to decode the spans. False: only `num_bytes` is counted, so that a measured server shares its
            machine with less work.

    Attributes:
        status: HTTP status of the answers.
        headers: the header fields of the last export, in lower case.
        num_bytes: number of bytes received.
    """

    def __init__(self, *, decodes: bool = True) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.num_bytes = 0
        self._decodes = decodes
        self._lock = threading.Lock()
        self._spans: list[CollectedSpan] = []

        class Handler(_Handler):
            collector = self

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL for `server.traces.endpoint`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[CollectedSpan]:
        """All spans so far, in the order of their arrival."""
        with self._lock:
            return list(self._spans)

    def named(self, name: str) -> list[CollectedSpan]:
        """Return the spans with a name."""
        return [span for span in self.spans if span.name == name]

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        """Return the spans of a trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait_for(self, name: str, num_spans: int = 1, timeout_s: float = 30.0) -> list[CollectedSpan]:
        """Wait until there are `num_spans` spans with a name, and return them.

        Raises:
            TimeoutError: they have not arrived after `timeout_s`.
        """
        wait_until(lambda: len(self.named(name)) >= num_spans, timeout_s, f"{num_spans} span(s) named {name!r}")
        return self.named(name)

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Store the spans of an export, and return the HTTP status of the answer."""
        if path != "/v1/traces":
            return 404
        found = list(_decoded(body)) if self._decodes and self.status == 200 else []
        with self._lock:
            self.headers = headers
            self.num_bytes += len(body)
            self._spans += found
        return self.status


class _Handler(BaseHTTPRequestHandler):
    collector: ClassVar[TraceCollector]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.send_response(self.collector.receive(self.path, headers, body))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _decoded(body: bytes) -> Iterator[CollectedSpan]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield _span(span, resource)


def _span(span: Span, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        attributes=_attributes(span.attributes),
        resource=resource,
        trace_state=span.trace_state,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
