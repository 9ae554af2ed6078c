"""Server-sent events, and the notice of clients that leave."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graftlm.errors import GraftlmError
from graftlm.server.errors import error_json, status_of

__all__ = ["EventStream", "until_disconnect"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would keep events back
}
_DONE: Final = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends JSON documents as events, as they come, and then `[DONE]`.

    The answer begins with the first event: what fails before it is raised, and answered with a status of its own, upon
    which clients try again by themselves. A later error becomes the last event before `[DONE]`.

    A client that leaves is noticed at once, not with the next event: the source is closed then, and its `finally` may
    give up what it was waiting for.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None] = lambda: None) -> None:
        """Take the source.

        Args:
            close: called at the end in any case, even when the client left before the source was first asked.
        """
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves.

        Raises:
            ClientDisconnect: it has left, as the server noticed when it sent something.
            Exception: the source's, when there was no event before it.
        """
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            try:
                await asyncio.wait({sending})
                await self._events.aclose()
            finally:  # also when the server, at its end, does not wait for that
                self._close()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        event = await anext(self._events, None)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while event is not None:
                await send({"type": "http.response.body", "body": b"data: %b\n\n" % event, "more_body": True})
                event = await self._next()
            await send({"type": "http.response.body", "body": _DONE})
        except OSError as error:
            raise ClientDisconnect from error

    async def _next(self) -> bytes | None:
        """Return the next event, which may tell of an error; None at the end."""
        try:
            return await anext(self._events, None)
        except Exception as error:
            if status_of(error) == 500:
                logger.exception("a stream failed")
            return error_json(error)


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Wait for some work, and cancel it when the client leaves.

    Raises:
        ClientDisconnect: it has left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, GraftlmError):
                await working


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
