"""uvicorn's HTTP/1.1 protocol with limits on the bytes that a client may send before it gets an answer."""

import asyncio
import contextlib
import re
import socket
from typing import Any, Final

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from graftlm.server.connections import ConnectionTable, Phase
from graftlm.server.errors import error_response

__all__ = ["TARGET_AUTHORITY", "HttpProtocol"]

#: Key in a request's `scope["state"]`. The value is "host:port" from a target in absolute form, as in
#: `GET http://host:port/path`.
TARGET_AUTHORITY: Final = "target_authority"

#: Maximum number of bytes per call of the parser. After each call, the protocol checks for pipelined requests.
_PIECE_BYTES: Final = 8192
_MAX_HEADER_FIELDS: Final = 256
#: Maximum number of raw bytes that are kept while a pipelined request waits. If more arrive, the connection is aborted.
#: One read from the socket returns fewer bytes than this.
_MAX_HELD_BYTES: Final = 2**20

#: Maximum number of unsent bytes of an answer that the operating system buffers. By default, it buffers up to 4 MiB,
#: and then accepts no bytes until the client has read a third. A slow client would seem to be stalled during this time.
_MAX_NOT_SENT_BYTES: Final = 2**17

_ABSOLUTE_FORM: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")


class HttpProtocol(HttpToolsProtocol):
    """Limits header fields, trailer fields, chunk extensions and pipelined requests, and updates the connection table.

    The parser and uvicorn keep header fields, trailer fields and the target in memory until these are complete.
    `_num_metadata_bytes` counts these bytes. The count is reset to 0 when a head or a request is complete, and by each
    part of a body. A request is refused if the count exceeds `max_header_bytes`:

        GET / HTTP/1.1 CRLF Host: ... CRLF CRLF | 5;extension CRLF hello CRLF | 0 CRLF trailer: ... CRLF CRLF
        |------------- metadata --------------|   |-- metadata -|               |-------- metadata --------|

    A request to upgrade to another protocol is served as if it had no `Upgrade` field (RFC 9110, section 7.8). After
    such a field, the parser would read the request's body as the next request. Therefore the parser gets the head a
    second time, without the field.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        table: ConnectionTable,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = table
        self._max_metadata_bytes = table.limits.max_header_bytes
        self._num_metadata_bytes = 0
        self._in_head = False
        self._in_body = False
        self._held = bytearray()  # raw bytes that arrived after a pipelined request
        self._refusal: tuple[int, str] | None = None
        self._repeated_head: bytes | None = None  # head without `Upgrade`; the parser gets this head after its pause
        self.body_bytes = 0

    # -- called by the connection table --------------------------------------------------------------------------------

    @property
    def is_read_paused(self) -> bool:
        """Whether reading is paused until the application reads the body, or answers an earlier request."""
        return self.flow.read_paused

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes of answers that the operating system has not accepted yet."""
        return self.transport.get_write_buffer_size()

    def expire(self, phase: Phase) -> None:
        """End a connection that was in a phase for too long, with 408 if part of a request has arrived."""
        if phase is Phase.BODY:
            self._refuse(408, "the body of the request arrived too slowly")
        elif phase is Phase.HEAD and (self._in_head or self._num_metadata_bytes):
            self._refuse(408, "the header fields of the request arrived too slowly")
        else:
            self.abort()

    def abort(self) -> None:
        """Close the connection immediately, and send no more bytes."""
        self.transport.abort()

    # -- called by asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add a connection to the table, or refuse it with 503 if the table is full."""
        super().connection_made(transport)
        _limit_not_sent(transport)
        if not self._table.admit(self):
            self._refuse(503, "too many connections (server.max_connections); try again")

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the table."""
        self._table.forget(self)
        self._held.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes, or store them while a pipelined request waits."""
        if self.transport.is_closing():
            return
        if self.pipeline or self._held:
            self._hold(data)
        else:
            self._parse(data)
        self._note_phase()

    def pause_writing(self) -> None:
        """Record that the client does not read."""
        super().pause_writing()
        self._note_phase()

    def resume_writing(self) -> None:
        """Record that the client reads again."""
        super().resume_writing()
        self._note_phase()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no further request arrived in time."""
        super().timeout_keep_alive_handler()
        self._note_phase()

    # -- called by the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Reset the state for a new request."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header field. Trailer fields are dropped, because the application already has the header fields."""
        if not self._in_head:
            return
        if len(self.headers) >= _MAX_HEADER_FIELDS:
            self._refusal = (431, f"a request may have at most {_MAX_HEADER_FIELDS} header fields")
            raise ValueError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application for the request, unless the head must be parsed a second time."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._refusal = (400, "CONNECT is a request to a proxy, and this server is not a proxy")
                raise ValueError
            self._repeated_head = self._head_without_upgrade()
            return
        self._num_metadata_bytes, self.body_bytes = 0, 0
        self._in_head, self._in_body = False, True
        if self.url == b"*" and self.parser.get_method() == b"OPTIONS":
            self.url = b"/*"  # the request concerns the server as a whole; no route has this path
        if not self.url.startswith(b"/"):
            match = _ABSOLUTE_FORM.match(self.url)
            state: dict[str, Any] = self.scope["state"]
            state[TARGET_AUTHORITY] = match[1].decode("latin-1") if match else ""
            if match and not self.url.startswith(b"/", match.end()):
                self.url = b"%b/%b" % (match[0], self.url[match.end() :])  # add the path "/", which clients may omit
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body to the application."""
        self._num_metadata_bytes = 0
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request, unless the head must be parsed a second time."""
        if self._repeated_head is not None:
            return
        self._num_metadata_bytes, self._in_body = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin the next request of the pipeline. If there is none, parse the stored bytes."""
        super().on_response_complete()
        if not self.transport.is_closing():
            held, self._held = self._held, bytearray()
            if self.pipeline:
                self._hold(held)
            elif held:
                self._parse(held)
        self._note_phase()

    # -- refusals ------------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser or one of the limits refused. uvicorn calls this method."""
        status, message = self._refusal or (400, msg)
        self._refuse(status, message)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error answer and close the connection.

        If the client would assign the answer to another request, the connection is closed without an answer.
        """
        self._unset_keepalive_if_required()
        if self._in_body and not self.cycle.response_started and not self.pipeline:
            self.cycle.disconnected = True  # the application writes no other answer
            self.cycle.message_event.set()
        elif self._answer_is_due:
            self.abort()
            return
        elif self._in_body:
            self._close()
            return
        response = error_response(status, message, headers={"Connection": "close"})
        fields = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
        self.transport.write(STATUS_LINE[status] + fields + b"\r\n" + bytes(response.body))
        self._close()

    def _close(self) -> None:
        """Close the connection after the client has read all bytes that were written."""
        self.transport.close()
        self._table.move(self, Phase.CLOSING)

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _answer_is_due(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self, data: bytes | bytearray) -> None:
        """Pass bytes to the parser until a request has to wait for the answer to an earlier one."""
        rest = memoryview(bytes(data))
        while rest and not self.transport.is_closing():
            if self.pipeline:
                self._hold(rest)
                return
            piece = rest[: min(_PIECE_BYTES, self._max_metadata_bytes - self._num_metadata_bytes)]
            rest = rest[len(piece) :]
            self._num_metadata_bytes += len(piece)
            self._feed(bytes(piece))
            if self._num_metadata_bytes >= self._max_metadata_bytes and not self.transport.is_closing():
                limit = self._max_metadata_bytes
                self._refuse(431, f"header fields are larger than server.max_header_bytes, {limit} bytes")

    def _feed(self, data: bytes) -> None:
        """Pass all of `data` to the parser, or the part before an error."""
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except HttpParserUpgrade as upgrade:
                    data = (self._repeated_head or b"") + data[upgrade.args[0] :]
                    self._repeated_head = None
        except HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _head_without_upgrade(self) -> bytes:
        """Return the last parsed head without `Upgrade`. It is shorter than the original."""
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = (b"%b:%b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        return line + b"".join(fields) + b"\r\n"

    def _hold(self, data: bytes | bytearray | memoryview) -> None:
        """Store bytes until they can be parsed, and pause reading until then."""
        self._held += data
        self.flow.pause_reading()
        if len(self._held) > _MAX_HELD_BYTES:
            self.abort()

    def _note_phase(self) -> None:
        if self.transport.is_closing():
            phase = Phase.CLOSING
        elif self.flow.write_paused:
            phase = Phase.STALLED
        elif self._in_body:
            phase = Phase.BODY
        elif self._answer_is_due:
            phase = Phase.ANSWER
        else:
            phase = Phase.HEAD if self._in_head or self._num_metadata_bytes else Phase.IDLE
        self._table.move(self, phase)


def _limit_not_sent(transport: asyncio.Transport) -> None:
    """Limit the number of unsent bytes of an answer that the system buffers, if the system has such an option."""
    option: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    connection = transport.get_extra_info("socket")
    if option is not None and connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, _MAX_NOT_SENT_BYTES)
