"""Errors in the format of Anthropic's API."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pydantic import BaseModel, Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.server.anthropic.paths import is_messages_path
from graftlm.server.errors import ERROR_RESPONSES as OPENAI_ERROR_RESPONSES
from graftlm.server.errors import message_of, status_of

__all__ = ["ERROR_RESPONSES", "AnthropicErrors", "error_event"]

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class AnthropicErrorDetail(BaseModel):
    """The type and message of an error."""

    type: str = Field(description="The kind of error, such as `invalid_request_error`.")
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of an error in Anthropic's format."""

    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None


#: Part of the OpenAPI description.
ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": AnthropicErrorBody, "description": response["description"]}
    for status, response in OPENAI_ERROR_RESPONSES.items()
}


class AnthropicErrors:
    """Converts error bodies on Anthropic's routes to Anthropic's format, and adds the header `request-id`.

    This includes the errors of other middleware, such as a missing API key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and convert the error in the answer, if there is one."""
        if scope["type"] != "http" or not is_messages_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewriter(send).send)


class _Rewriter:
    """Forwards one answer. The body of an error is buffered until it is complete, and then converted."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._error_start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        """Handle a part of the answer from the application."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["request-id"] = headers.get("x-request-id", "")
            if message["status"] >= 400 and headers.get("content-type") == "application/json":
                self._error_start = message
                return
        if self._error_start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._send_error(self._error_start)

    async def _send_error(self, start: Message) -> None:
        headers = Headers(raw=start["headers"])
        body = _rewritten(start["status"], self._body, headers.get("request-id"))
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


def error_event(error: BaseException) -> bytes:
    """Return the last event of a stream that failed."""
    return b"event: error\ndata: %b\n\n" % _body(status_of(error), message_of(error), None)


def _rewritten(status: int, body: bytes, request_id: str | None) -> bytes:
    return _body(status, str(msgspec.json.decode(body)["error"]["message"]), request_id)


def _body(status: int, message: str, request_id: str | None) -> bytes:
    detail = {"type": _TYPES.get(status, "invalid_request_error"), "message": message}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})
