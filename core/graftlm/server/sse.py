"""Server-sent events, and the detection of clients that disconnect."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graftlm.errors import GraftlmError
from graftlm.server.errors import error_json, status_of

__all__ = ["OPENAI_EVENTS", "EventFormat", "EventStream", "until_disconnect"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # otherwise nginx buffers events
}


@dataclass(frozen=True, slots=True)
class EventFormat:
    """The format in which a stream is written.

    Attributes:
        frame: converts an item of the source to the bytes of its event.
        error: converts an error after the first event to the bytes of the last event.
        end: the bytes after the last event.
    """

    frame: Callable[[bytes], bytes]
    error: Callable[[BaseException], bytes]
    end: bytes = b""


def _data_of(document: bytes) -> bytes:
    return b"data: %b\n\n" % document


#: Format for items that are JSON documents. The last event is `[DONE]`.
OPENAI_EVENTS: Final = EventFormat(_data_of, lambda error: _data_of(error_json(error)), b"data: [DONE]\n\n")


class EventStream(Response):
    """Sends each event of a source when it arrives.

    The answer begins with the first event. An error before the first event is raised, so the answer has an error status
    and clients can repeat the request. A later error is sent as the last event before `[DONE]`.

    If the client disconnects, the source is closed immediately, not only at the next event. The source's `finally` can
    then abort the request.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None] = lambda: None,
        event_format: EventFormat = OPENAI_EVENTS,
    ) -> None:
        """Initialize the response.

        Args:
            events: the source of events.
            close: function that is always called at the end, even if the client disconnects before the first event is
                requested from the source.
        """
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._format = event_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client disconnects.

        Raises:
            ClientDisconnect: an event could not be sent, because the client has disconnected.
            Exception: the source raised this error before its first event.
        """
        sending = asyncio.ensure_future(self._send(send))
        disconnecting = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnecting.cancel()
            sending.cancel()
            try:
                await asyncio.wait({sending})
                await self._events.aclose()
            finally:  # runs even if the server exits and cancels this task
                self._close()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        first = await anext(self._events, None)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            event = None if first is None else self._format.frame(first)
            while event is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                event = await self._next()
            await send({"type": "http.response.body", "body": self._format.end})
        except OSError as error:
            raise ClientDisconnect from error

    async def _next(self) -> bytes | None:
        """Return the bytes of the next event, which may describe an error of the source; None at the end."""
        try:
            event = await anext(self._events, None)
        except Exception as error:
            if status_of(error) == 500:
                logger.exception("a stream failed")
            return self._format.error(error)
        return None if event is None else self._format.frame(event)


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Wait for `work` and return its result. If the client disconnects, cancel `work`.

    Raises:
        ClientDisconnect: the client has disconnected.
        Exception: the error of `work`.
    """
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        disconnecting.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, GraftlmError):
                await working


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
