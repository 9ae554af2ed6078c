"""A limit on the size of request bodies, with and without Content-Length."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.server.errors import error_response

__all__ = ["BodyLimit"]

#: The rest of the body is not read. So the connection cannot be used for another request.
_CLOSE = {"Connection": "close"}


class BodyLimit:
    """Answers 413 if a body is larger than `max_bytes`.

    A request with a larger Content-Length is refused at once, another one while its body arrives.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        # No body is so long that its length has 19 digits, and int() refuses numbers with thousands of digits.
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
                    # The handler that reads the body raises this; the application converts it into an answer.
                    raise HTTPException(413, self._refusal, headers=_CLOSE)
            return message

        return counted
