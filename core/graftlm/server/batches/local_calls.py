"""Calls to the server's own endpoints without a connection."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

__all__ = ["LocalAnswer", "LocalCalls"]


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """The answer of an endpoint."""

    status: int
    body: Any


class LocalCalls:
    """Calls an ASGI application in this process.

    Args:
        app: the application without the layers that check keys and origins.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: Mapping[str, Any], request_id: str) -> LocalAnswer:
        """Send a JSON body, and return the whole answer. A cancellation aborts the request.

        Args:
            request_id: the id of the HTTP request, for logs.
        """
        # JSON in ASCII, because UTF-8 cannot encode half a surrogate pair. The endpoint refuses such a body.
        sent = [json.dumps(body).encode()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {"request_id": request_id},
        }
        status, pieces = 500, []

        async def receive() -> Message:
            if sent:
                return {"type": "http.request", "body": sent.pop(), "more_body": False}
            await asyncio.Event().wait()  # this client never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                pieces.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return LocalAnswer(status, msgspec.json.decode(b"".join(pieces)))
