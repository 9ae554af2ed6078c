"""Sends requests to an ASGI application without a server; allows chunked bodies and unusual headers."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

__all__ = ["Answer", "call"]


@dataclass
class Answer:
    """The answer of an application. `status` is None if the application did not answer."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        """Return the body parsed as JSON."""
        return json.loads(self.body)


async def call(
    app: ASGIApp,
    method: str = "GET",
    path: str = "/",
    headers: Iterable[tuple[str, str]] = (),
    chunks: Sequence[bytes] = (b"",),
    **scope_fields: Any,
) -> Answer:
    """Send a request and return the answer.

    Args:
        app: the application.
        method: HTTP method.
        path: path of the URL.
        headers: (name, value) pairs.
        chunks: chunks of the body; each chunk is sent as one ASGI message.
        scope_fields: additional entries of the ASGI scope, such as `client`.
    """
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
    } | scope_fields
    left = list(chunks)

    async def receive() -> Message:
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    answer = Answer()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, send)
    return answer
