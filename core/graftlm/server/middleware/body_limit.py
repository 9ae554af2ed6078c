"""A limit on the size of request bodies, with and without Content-Length."""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.server.errors import error_response

__all__ = ["BodyLimit"]

#: Header that closes the connection. The connection cannot be reused, because the rest of the body is not read.
_CLOSE = {"Connection": "close"}


class BodyLimit:
    """Answers 413 if a body is larger than `max_bytes`.

    A request with a larger Content-Length is refused immediately; other requests are refused while the body arrives.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, other_limits: Mapping[str, tuple[int, str]] | None = None) -> None:
        """Store the limits.

        Args:
            other_limits: path -> (limit that replaces `max_bytes`, name of its setting).
        """
        self._app = app
        self._max_bytes = max_bytes
        self._other_limits = other_limits or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 413 if its body is too large."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        # A length of 19 or more digits is refused without int(), which raises an error for thousands of digits.
        limit, setting = self._other_limits.get(scope["path"], (self._max_bytes, "server.max_body_bytes"))
        if stated.isdecimal() and (len(stated) > 18 or int(stated) > limit):
            await error_response(413, _refusal(limit, setting), headers=_CLOSE)(scope, receive, send)
            return
        await self._app(scope, _counting(receive, limit, setting), send)


def _refusal(limit: int, setting: str) -> str:
    return f"the request body is larger than {limit} bytes, the maximum set by {setting}"


def _counting(receive: Receive, limit: int, setting: str) -> Receive:
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        if message["type"] == "http.request":
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                # Raised where the handler reads the body. The application converts the exception to an answer.
                raise HTTPException(413, _refusal(limit, setting), headers=_CLOSE)
        return message

    return counted
