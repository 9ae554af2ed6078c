"""HTTP on one connection, over real sockets: the size limits and timeouts of requests."""

import asyncio
import contextlib
import json
import re
from functools import partial

import pytest
import uvicorn

from graftlm.server.connections import ConnectionLimits, ConnectionTable
from graftlm.server.http_protocol import TARGET_AUTHORITY, HttpProtocol

MAX_HEADER = 4096
LIMITS = ConnectionLimits(max_connections=8, max_header_bytes=MAX_HEADER, header_timeout_s=0.3, stall_timeout_s=0.3)
PATIENT = ConnectionLimits(max_connections=8, max_header_bytes=MAX_HEADER)


class Echo:
    """Answers with a description of the request; /much sends 16 MiB in pieces and /once in one piece.

    /wait waits for `go` before it reads the body. /begin waits for `go` after the first half of its answer. /early
    answers with 401 and does not read the body.
    """

    def __init__(self):
        self.go = asyncio.Event()
        self.paths = []

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        if scope["path"] == "/wait":
            await self.go.wait()
        if scope["path"] == "/early":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"no"})
            return
        if scope["path"] == "/begin":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"ye", "more_body": True})
            await self.go.wait()
            await send({"type": "http.response.body", "body": b"s!"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        seen = {
            "path": scope["path"],
            "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
            "body": len(body),
            "target": scope["state"].get(TARGET_AUTHORITY),
        }
        answer = b"x" * 2**24 if scope["path"] in ("/much", "/once") else json.dumps(seen).encode()
        fields = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        size = len(answer) if scope["path"] == "/once" else 2**16
        for start in range(0, len(answer), size):
            more = start + size < len(answer)
            await send({"type": "http.response.body", "body": answer[start : start + size], "more_body": more})


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Site:
    def __init__(self, app, table, port):
        self.app, self.table, self.port = app, table, port

    async def connect(self, *parts):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for part in parts:
            writer.write(part)
        return reader, writer

    async def all_of(self, *parts):
        """Send bytes and return the whole answer when the server has closed the connection."""
        reader, writer = await self.connect(*parts)
        try:
            return await read_all(reader)
        finally:
            writer.close()


class SlowLine(asyncio.Transport):
    """A connection whose client reads only when `read` is called, with asyncio's limits of the write buffer."""

    def __init__(self):
        super().__init__()
        self.unsent, self.num_read = bytearray(), 0
        self.is_paused = self.has_ended = self.was_aborted = self._closing = False
        self.protocol = None

    def open(self, protocol):
        self.protocol = protocol
        protocol.connection_made(self)

    def read(self, num_bytes):
        self.num_read += len(self.unsent[:num_bytes])
        del self.unsent[:num_bytes]
        if self.is_paused and len(self.unsent) <= 2**14:
            self.is_paused = False
            self.protocol.resume_writing()
        if self._closing and not self.unsent:
            self._end()

    def write(self, data):
        self.unsent += data
        if len(self.unsent) > 2**16 and not self.is_paused:
            self.is_paused = True
            self.protocol.pause_writing()

    def get_write_buffer_size(self):
        return len(self.unsent)

    def is_closing(self):
        return self._closing

    def close(self):
        self._closing = True
        if not self.unsent:
            self._end()

    def abort(self):
        self._closing = self.was_aborted = True
        self.unsent.clear()
        self._end()

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def _end(self):
        if not self.has_ended:
            self.has_ended = True
            self.protocol.connection_lost(None)


async def read_all(reader):
    """Return all data until the end of a connection, with or without an error."""
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(2**16), 20):
            found += part
    return bytes(found)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(limits):
    app, table = Echo(), ConnectionTable(limits)
    config = uvicorn.Config(
        app, port=0, http=partial(HttpProtocol, table=table), lifespan="off", log_config=None, ws="none"
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    tasks = [asyncio.create_task(server.serve()), asyncio.create_task(table.run())]
    await until(lambda: server.started)
    yield Site(app, table, server.servers[0].sockets[0].getsockname()[1])
    app.go.set()
    server.should_exit = server.force_exit = True
    await tasks[0]
    for listener in server.servers:  # a forced exit leaves them open
        listener.close()
    tasks[1].cancel()


def served_in_memory(clock, app=None):
    """Return a connection to Echo without a socket, the connection's table and uvicorn's state."""
    table, state, transport = ConnectionTable(PATIENT, clock), uvicorn.server.ServerState(), SlowLine()
    config = uvicorn.Config(app or Echo(), lifespan="off", log_config=None, ws="none")
    transport.open(HttpProtocol(config, state, {}, table=table))
    return transport, table, state


def head(size, line=b"GET / HTTP/1.1\r\n"):
    """Return a request of a given size without a body."""
    rest = b"Host: a\r\nConnection: close\r\nA: "
    return line + rest + b"a" * (size - len(line) - len(rest) - 4) + b"\r\n\r\n"


def chunked(*chunks):
    return b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


LONG = b"a" * MAX_HEADER


@pytest.mark.parametrize(
    "request_bytes",
    [
        head(MAX_HEADER),
        chunked(b"1;" + b"e" * 2000 + b"\r\na\r\n", b"1;" + b"e" * 2000 + b"\r\na\r\n", b"0\r\n\r\n"),
        chunked(b"1\r\na\r\n" * 5000, b"0\r\n\r\n"),
        chunked(b"%x\r\n" % 10**6, b"a" * 10**6, b"\r\n0\r\nT: " + b"t" * 2000 + b"\r\n\r\n"),
    ],
    ids=["head", "chunk extensions", "many small chunks", "large body and trailer"],
)
async def test_requests_within_the_limits_are_served(request_bytes):
    async with serving(PATIENT) as site:
        assert (await site.all_of(request_bytes)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([head(MAX_HEADER + 1)], 431),
        ([b"GET / HTTP/1.1\r\nHost: a\r\nA: ", LONG], 431),
        ([b"GET / HTTP/1.1\r\nHost: a\r\n", b"A: a\r\n" * 1000], 431),
        ([b"GET /", LONG], 431),
        ([b"GET / HTTP/1.1\r\nHost: a\r\n", b"A:\r\n" * 300, b"\r\n"], 431),
        ([b"\r\n" * MAX_HEADER], 431),
        ([b"nonsense\r\n\r\n"], 400),
        ([b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n"], 400),
    ],
    ids=[
        "one byte more",
        "endless line",
        "endless lines",
        "endless target",
        "many fields",
        "empty lines",
        "no HTTP",
        "tunnel",
    ],
)
async def test_larger_heads_are_refused_with_an_error_body_and_the_connection_is_closed(parts, status):
    async with serving(PATIENT) as site:
        answer = await site.all_of(*parts)
        fields, _, body = answer.partition(b"\r\n\r\n")
        assert fields.startswith(b"HTTP/1.1 %d" % status), answer
        assert b"connection: close" in fields.lower()
        assert json.loads(body)["error"]["message"]
        assert site.app.paths == []


@pytest.mark.parametrize(
    "parts",
    [
        [chunked(b"1;e="), LONG * 3],
        [chunked(b"1\r\na\r\n0\r\nT: "), LONG * 3],
        [chunked(b"1\r\na\r\n0\r\n"), b"T: t\r\n" * 3000],
    ],
    ids=["chunk extension", "trailer line", "trailer lines"],
)
async def test_endless_chunk_extensions_and_trailers_close_the_connection(parts):
    async with serving(PATIENT) as site:
        assert b"200 OK" not in await site.all_of(*parts)
        await until(lambda: len(site.table) == 0)


async def begin_body(line, fault):
    """Send a request with a faulty body; return the transport, the application, and uvicorn's state."""
    clock, app = Clock(), Echo()
    transport, table, state = served_in_memory(clock, app)
    transport.protocol.data_received(line + b"Host: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
    for _ in range(10):  # /early sends its answer and /begin starts its own
        await asyncio.sleep(0)
    if fault is None:
        clock.now_s += 31
        table.sweep()
    else:
        for start in range(0, len(fault), 1024):
            transport.protocol.data_received(fault[start : start + 1024])
    return transport, app, state


FAULTS = pytest.mark.parametrize(
    ("fault", "status"),
    [(None, 408), (b"zz\r\n", 400), (b"1;a=" + LONG, 431), (b"0\r\nT: " + LONG, 431), (b"0\r\nT t\r\n\r\n", 400)],
    ids=["slow", "no chunk", "chunk extension", "large trailer", "no trailer"],
)


@FAULTS
@pytest.mark.parametrize("line", [b"POST / HTTP/1.1\r\n", b"POST /wait HTTP/1.1\r\nExpect: 100-continue\r\n"])
async def test_a_faulty_body_gets_exactly_one_error_answer(line, fault, status):
    transport, app, state = await begin_body(line, fault)
    app.go.set()
    await until(lambda: not state.tasks)
    answer = bytes(transport.unsent)
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert answer.count(b"HTTP/1.1") == 1
    assert transport.is_closing()


@FAULTS
async def test_a_faulty_body_that_was_already_answered_only_closes_the_connection(fault, status):
    transport, _, state = await begin_body(b"POST /early HTTP/1.1\r\n", fault)
    await until(lambda: not state.tasks)
    assert transport.unsent.startswith(b"HTTP/1.1 401")
    assert transport.unsent.endswith(b"\r\n\r\nno")
    assert transport.is_closing()
    transport.read(2**20)
    assert transport.has_ended


@FAULTS
async def test_a_faulty_body_aborts_an_answer_that_has_begun(fault, status):
    transport, app, state = await begin_body(b"POST /begin HTTP/1.1\r\n", fault)
    assert transport.was_aborted
    app.go.set()
    await until(lambda: not state.tasks)
    assert not transport.unsent


async def test_trailer_fields_do_not_become_header_fields():
    async with serving(PATIENT) as site:
        answer = await site.all_of(chunked(b"1\r\na\r\n0\r\nHost: evil\r\nAuthorization: Bearer x\r\n\r\n"))
        names = [name for name, _ in json.loads(answer.partition(b"\r\n\r\n")[2])["headers"]]
        assert names == ["host", "connection", "transfer-encoding"]


@pytest.mark.parametrize(
    ("target", "path", "seen"),
    [
        (b"/a", "/a", None),
        (b"http://b:1/a", "/a", "b:1"),
        (b"http://u@b/a", "/a", "u@b"),
        (b"HTTPS://B/a?http://c/", "/a", "B"),
        (b"http://b:1", "/", "b:1"),
        (b"http://b?c=/d", "/", "b"),
    ],
)
async def test_the_authority_of_an_absolute_target_is_recorded(target, path, seen):
    async with serving(PATIENT) as site:
        answer = await site.all_of(head(200, b"GET " + target + b" HTTP/1.1\r\n"))
        found = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (found["path"], found["target"]) == (path, seen)


@pytest.mark.parametrize(("method", "path", "target"), [(b"OPTIONS", "/*", None), (b"GET", "*", "")])
async def test_only_options_accepts_the_target_asterisk(method, path, target):
    """GET records an absolute target without a host, which `HostGuard` refuses."""
    async with serving(PATIENT) as site:
        answer = await site.all_of(head(200, method + b" * HTTP/1.1\r\n"))
        found = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (found["path"], found["target"]) == (path, target)


UPGRADE = b"Host: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
HIDDEN = b"POST /hidden HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "seen"),
    [
        (b"POST /a HTTP/1.1\r\n%bContent-Length: 3\r\n\r\nabc" % UPGRADE, [["/a", 3]]),
        (b"POST /a HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (UPGRADE, len(HIDDEN), HIDDEN), [["/a", len(HIDDEN)]]),
        (
            b"POST /a HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nUpgrade: h2c\r\n\r\n"
            % (UPGRADE, len(HIDDEN), HIDDEN),
            [["/a", len(HIDDEN)]],
        ),
        (b"GET /a HTTP/1.1\r\n%b\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n" % UPGRADE, [["/a", 0], ["/b", 0]]),
        (b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", [["/a", 0]]),
        (b"POST /a HTTP/1.1\r\n%bupgrade: x\r\nContent-Length: 1\r\n\r\na" % UPGRADE * 3, [["/a", 1]] * 3),
        (b"POST /a HTTP/1.1\r\n%bContent-Length: 10000\r\n\r\n" % UPGRADE + b"a" * 10_000, [["/a", 10_000]]),
    ],
    ids=["body", "request as body", "chunks", "pipelined", "websocket", "three", "large body"],
)
@pytest.mark.parametrize("size", [2**20, 1, 7], ids=["at once", "byte by byte", "7 bytes a time"])
async def test_a_request_to_upgrade_is_served_like_any_other(request_bytes, seen, size):
    app = Echo()
    transport, _, _ = served_in_memory(Clock(), app)
    last = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    for start in range(0, len(request_bytes), size):
        transport.protocol.data_received(request_bytes[start : start + size])
    transport.protocol.data_received(last)
    await until(lambda: transport.is_closing())
    answers = [json.loads(it) for it in re.findall(rb"\r\n\r\n(\{.*?\})(?=HTTP|$)", bytes(transport.unsent))]
    assert [[it["path"], it["body"]] for it in answers] == [*seen, ["/last", 0]]
    assert "upgrade" not in dict(answers[0]["headers"])


async def test_pipelined_requests_are_answered_in_order_and_few_are_parsed_ahead():
    async with serving(PATIENT) as site:
        requests = b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(3000))
        last = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        reader, writer = await site.connect(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n", requests, last)
        await until(lambda: site.app.paths == ["/wait"])
        (connection,) = site.table._phases
        await until(lambda: connection.pipeline and connection._held)
        assert len(connection.pipeline) < 500
        site.app.go.set()
        await read_all(reader)
        writer.close()
        assert site.app.paths == ["/wait", *(f"/{number}" for number in range(3000)), "/last"]


@pytest.mark.parametrize("fault", [b"nonsense\r\n\r\n", chunked(b"zz\r\n"), chunked(b"0\r\nT t\r\n\r\n")])
async def test_an_error_after_a_pending_request_does_not_replace_its_answer(fault):
    async with serving(PATIENT) as site:
        reader, writer = await site.connect(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + fault)
        assert await read_all(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    ("beginning", "drop", "answer"),
    [
        (b"", b"", b""),
        (b"GET / HTTP/1.1\r\nHost:", b"", b"HTTP/1.1 408"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nA: ", b"a", b"HTTP/1.1 408"),
        (b"", b"\r\n", b"HTTP/1.1 408"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n", b"HTTP/1.1 200"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n", b"a", b"HTTP/1.1 408"),
        (chunked(), b"1;a\r\na\r\n", b"HTTP/1.1 408"),
    ],
    ids=[
        "nothing",
        "half a head",
        "slow head",
        "empty lines",
        "empty lines after a request",
        "slow body",
        "slow chunks",
    ],
)
async def test_a_client_that_makes_no_progress_is_disconnected(beginning, drop, answer):
    async with serving(LIMITS) as site:
        reader, writer = await site.connect(beginning)
        end = asyncio.create_task(read_all(reader))

        def drip():
            if not writer.is_closing():
                writer.write(drop)
            return end.done()

        await until(drip)
        writer.close()
        assert end.result().startswith(answer)
        assert answer or not end.result()


@pytest.mark.parametrize("line", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
@pytest.mark.parametrize("path", [b"/much", b"/once"])
async def test_a_client_that_does_not_read_its_answer_is_disconnected(path, line):
    async with serving(LIMITS) as site:
        _, writer = await site.connect(b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path, line))
        writer.transport.pause_reading()
        await until(lambda: site.app.paths)
        await until(lambda: len(site.table) == 0)
        writer.close()


@pytest.mark.parametrize("line", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
@pytest.mark.parametrize("path", [b"/much", b"/once"])
async def test_a_client_that_reads_slowly_gets_its_whole_answer(path, line):
    """At 150 kB/s, 16 MiB take 112 s; the limit is 30 s."""
    clock = Clock()
    transport, table, state = served_in_memory(clock)
    transport.protocol.data_received(b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path, line))
    await until(lambda: transport.unsent)
    while state.tasks or transport.unsent:
        transport.read(150_000)
        clock.now_s += 1
        table.sweep()
        for _ in range(3):  # the application sends more
            await asyncio.sleep(0)
    assert transport.num_read > 2**24
    assert clock.now_s > 100
    assert not transport.was_aborted
    assert transport.has_ended == bool(line)


async def test_the_socket_buffer_is_small_so_that_slow_progress_is_visible():
    async with serving(PATIENT) as site:
        _, writer = await site.connect(b"GET /once HTTP/1.1\r\nHost: a\r\n\r\n")
        writer.transport.pause_reading()
        await until(lambda: [it for it in site.table._phases if it.flow.write_paused])
        (connection,) = site.table._phases
        assert connection.unsent_bytes > 2**24 - 2**21
        writer.close()


async def test_an_idle_connection_with_an_unread_answer_is_closed_after_a_limit():
    clock = Clock()
    transport, table, _ = served_in_memory(clock)
    transport.protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await until(lambda: transport.unsent.endswith(b"}"))
    transport.protocol.timeout_keep_alive_handler()  # uvicorn calls it after 75 s
    clock.now_s += 30
    table.sweep()
    assert transport.was_aborted
    assert len(table) == 0


async def test_a_handler_may_take_longer_than_the_limits_of_connections():
    async with serving(LIMITS) as site:
        reader, writer = await site.connect(b"GET /wait HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        half_open = await site.connect(b"GET /")  # this connection times out later than the first one would
        await read_all(half_open[0])
        site.app.go.set()
        assert (await read_all(reader)).startswith(b"HTTP/1.1 200")
        writer.close()
        half_open[1].close()


async def test_half_open_connections_are_replaced_and_active_requests_are_not():
    async with serving(PATIENT) as site:
        waiting = [await site.connect(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(7)]
        await until(lambda: len(site.app.paths) == 7)
        half_open = [await site.connect(b"GET /half") for _ in range(20)]
        assert (await site.all_of(head(200))).startswith(b"HTTP/1.1 200")
        await asyncio.gather(*(read_all(reader) for reader, _ in half_open))
        eighth = await site.connect(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: site.app.paths.count("/wait") == 8)
        assert (await site.all_of()).startswith(b"HTTP/1.1 503")
        site.app.go.set()
        for reader, writer in (*waiting, eighth):
            assert (await asyncio.wait_for(reader.read(12), 20)) == b"HTTP/1.1 200"
            writer.close()
        for _, writer in half_open:
            writer.close()
