"""The layer of the server that begins and ends the span of each HTTP request."""

import asyncio
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.processes.prompt_traces import request_trace_var
from graftlm.server.errors import shortened
from graftlm.server.traces.exporter import TraceExporter
from graftlm.server.traces.request_spans import RequestSpans
from graftlm.server.traces.traced_prompt import AttributeValue

__all__ = ["TraceRequests"]

#: Values of `gen_ai.operation.name`, by the last part of the route. OpenTelemetry defines "chat", "text_completion" and
#: "embeddings".
_OPERATIONS: Final = {
    "generate": "text_completion",
    "completions": "text_completion",
    "messages": "chat",
    "responses": "chat",
    "embeddings": "embeddings",
    "encode": "embeddings",
    "classify": "classify",
    "rerank": "rerank",
    "score": "score",
}
_MAX_PATH_LEN: Final = 300
_CHAT_PATH: Final = "/v1/chat/completions"


class TraceRequests:
    """Creates a span for each HTTP request, except requests to `ignored_paths`.

    The span is a child of the span in the request's `traceparent` header. The sampled flag of that header decides
    whether the request is traced; without the header, the sampler decides. `scope["state"]["trace_id"]` is set if the
    request is traced.

    Args:
        app: the application.
        exporter: creates spans.
        model: name of the served model.
        kind: SERVER for requests of clients, INTERNAL for calls within this process.
        ignored_paths: paths without spans, such as those of health checks.
    """

    def __init__(
        self,
        app: ASGIApp,
        exporter: TraceExporter,
        model: str,
        kind: SpanKind = SpanKind.SERVER,
        ignored_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._exporter = exporter
        self._model = model
        self._kind = kind
        self._ignored_paths = ignored_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, within a span."""
        spans = None
        if scope["type"] == "http" and scope["path"] not in self._ignored_paths:
            spans = self._begin(scope)
        # Also set for requests without spans: a batch runs in the context of the request that created it.
        token = request_trace_var.set(spans)
        try:
            if spans is None:
                await self._app(scope, receive, send)
            else:
                await self._traced(scope, receive, send, spans)
        finally:
            request_trace_var.reset(token)

    def _begin(self, scope: Scope) -> RequestSpans | None:
        exporter = self._exporter
        parent = exporter.propagator.extract(Headers(scope=scope), Context())
        attributes = {
            "http.request.method": scope["method"],
            "url.path": shortened(scope["path"], _MAX_PATH_LEN),
            "url.scheme": scope["scheme"],
        }
        span = exporter.tracer.start_span(scope["method"], parent, self._kind, attributes)
        if not span.is_recording():
            return None
        state = scope.setdefault("state", {})
        state["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        if "request_id" in state:
            span.set_attribute("graftlm.request.id", state["request_id"])
        return RequestSpans(span, exporter.tracer, self._model)

    async def _traced(self, scope: Scope, receive: Receive, send: Send, spans: RequestSpans) -> None:
        attributes: dict[str, AttributeValue] = {}
        failure: str | None = None

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                attributes["http.response.status_code"] = message["status"]
                if Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream"):
                    attributes["gen_ai.request.stream"] = True
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
        except (ClientDisconnect, asyncio.CancelledError):
            failure = "abort"
            raise
        except Exception as error:
            failure = type(error).__name__
            raise
        finally:
            status = attributes.get("http.response.status_code")
            if failure is None and not isinstance(status, int):
                failure = "abort"  # the client disconnected before the answer began
            elif failure is None and isinstance(status, int) and status >= 500:
                failure = str(status)
            spans.end_answer(_name(scope, attributes), attributes, failure)


def _name(scope: Scope, attributes: dict[str, AttributeValue]) -> str:
    """Return the name of a request's span, and add the attributes that depend on the route.

    The path is not part of the name, unless it is the path of a route: a name has few values.
    """
    route = getattr(scope.get("route"), "path", None)
    if route is None:
        return str(scope["method"])
    attributes["http.route"] = route
    operation = "chat" if route == _CHAT_PATH else _OPERATIONS.get(route.rpartition("/")[2])
    if operation is not None and scope["method"] == "POST":
        attributes["gen_ai.operation.name"] = operation
    return f"{scope['method']} {route}"
