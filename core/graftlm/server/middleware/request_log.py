"""The outermost layer of the server, which assigns ids, logs requests, and answers if a handler fails."""

import logging
import string
import time
import uuid
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.logs import request_id_var
from graftlm.server.errors import error_response, shortened

__all__ = ["PROBES", "RequestLog"]

logger = logging.getLogger("graftlm.server.access")

_MAX_ID_LEN: Final = 128
#: Maximum length of the reason for a refusal in the log, in characters.
_MAX_PROBLEM_LEN: Final = 300
_MAX_PATH_LEN: Final = 300
_PRINTABLE: Final = frozenset(string.ascii_letters + string.digits + string.punctuation)

#: Paths that programs request every few seconds. Answers without an error are logged at the level DEBUG.
PROBES: Final = frozenset({"/health", "/ready", "/ping", "/metrics", "/dashboard/state", "/dashboard/tree"})

#: The status that proxies log for a client that disconnected before its answer began.
_CLIENT_DISCONNECTED: Final = 499


class RequestLog:
    """Assigns an id to each request, logs the request, and answers 500 for exceptions that no other layer handles.

    The id is the client's `X-Request-Id`, or random if this is missing or not valid. It is stored in
    `scope["state"]["request_id"]`, added to the log lines that are written while the request is handled, and sent in
    the answer's `X-Request-Id`. If the request is traced, the JSON log line contains the trace id as `trace_id`.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _valid_id(Headers(scope=scope).get("x-request-id")) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started_s = self._clock()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        token = request_id_var.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # the client cannot get an answer, and this is not an error of the server
        except Exception:
            logger.exception("%s %s failed", scope["method"], _path(scope))
            if status is not None:
                raise  # part of the answer has been sent, so uvicorn has to close the connection
            await error_response(500, "the server failed to handle the request")(scope, receive, send_with_id)
        finally:
            self._log(scope, status, self._clock() - started_s)
            request_id_var.reset(token)

    def _log(self, scope: Scope, status: int | None, seconds: float) -> None:
        logged_status = _CLIENT_DISCONNECTED if status is None else status
        level = logging.DEBUG if scope["path"] in PROBES and logged_status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields = {
            "method": scope["method"],
            "path": _path(scope),
            "status": logged_status,
            "duration_ms": round(seconds * 1000, 1),
        }
        state = scope.get("state", {})
        if "trace_id" in state:
            fields["trace_id"] = state["trace_id"]
        problem = state.get("problem")
        if problem is not None:
            fields["problem"] = " ".join(str(problem).split())[:_MAX_PROBLEM_LEN]
        text = "%(method)s %(path)s %(status)d in %(duration_ms).1f ms" + (": %(problem)s" if problem else "")
        logger.log(level, text, fields, extra=fields)


def _valid_id(request_id: str | None) -> str | None:
    """Return the id if it can safely be written to a log and a header, else None."""
    if request_id and len(request_id) <= _MAX_ID_LEN and _PRINTABLE.issuperset(request_id):
        return request_id
    return None


def _path(scope: Scope) -> str:
    """Return the percent-encoded path that the client sent. A decoded path may contain line breaks."""
    raw = scope.get("raw_path")
    return shortened(raw.decode("latin-1") if raw else repr(scope["path"])[1:-1], _MAX_PATH_LEN)
