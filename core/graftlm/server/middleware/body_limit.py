"""A bound on request bodies, whether they state their length or not."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.server.errors import error_response

__all__ = ["BodyLimit"]

#: The rest of the body is not read, so nothing else can follow on the connection.
_CLOSE = {"Connection": "close"}


class BodyLimit:
    """Answers 413 to bodies above a size, before or while they arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through whose body is small enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        # Nobody means a number of 19 digits, and int() refuses those of thousands.
        if stated.isdecimal() and (len(stated) > 18 or int(stated) > self._max_bytes):
            await error_response(413, self._refusal, headers=_CLOSE)(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    @property
    def _refusal(self) -> str:
        return f"the request body is larger than {self._max_bytes} bytes, which server.max_body_bytes allows"

    def _counting(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    # Raised where the handler reads its body; the application turns it into an answer.
                    raise HTTPException(413, self._refusal, headers=_CLOSE)
            return message

        return counted
