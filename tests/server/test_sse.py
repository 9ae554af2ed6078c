"""Event streams and the detection of disconnects, in raw ASGI, so that a test controls when a client disconnects."""

import asyncio
import json

import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request

from graftlm.errors import RequestTimeoutError, UnavailableError
from graftlm.server.errors import install_error_handlers
from graftlm.server.sse import EventStream, until_disconnect

SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/stream",
    "raw_path": b"/stream",
    "query_string": b"",
    "root_path": "",
    "scheme": "http",
    "headers": [],
}


class Client:
    """Reads a response; `leave` disconnects."""

    def __init__(self, is_broken=False, is_slow=False):
        self.messages = []
        self.is_broken = is_broken
        self._gone = asyncio.Event()
        self._reads = asyncio.Event()
        if not is_slow:
            self._reads.set()

    def leave(self):
        self._gone.set()

    async def receive(self):
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self.is_broken:
            raise OSError("connection reset")
        await self._reads.wait()
        self.messages.append(message)

    async def read(self, app):
        async with asyncio.timeout(5):
            await app(SCOPE, self.receive, self.send)

    @property
    def status(self):
        return self.messages[0]["status"]

    @property
    def headers(self):
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def events(self):
        text = b"".join(message["body"] for message in self.messages[1:]).decode()
        assert text.endswith("\n\n")
        return [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]


class Source:
    """Yields some events, then raises, ends or waits forever; counts how often it was closed."""

    def __init__(self, *events, then=None):
        self.items = events
        self.then = then
        self.num_closed = 0
        self.waits = asyncio.Event()

    async def events(self):
        try:
            for item in self.items:
                yield item
            if isinstance(self.then, Exception):
                raise self.then
            if self.then == "wait":
                self.waits.set()
                await asyncio.Event().wait()
        finally:
            self.num_closed += 1


async def test_events_are_sent_unchanged_and_followed_by_done():
    client, source = Client(), Source(b'{"a":1}', b"2")
    await client.read(EventStream(source.events()))
    assert client.events == ['{"a":1}', "2", "[DONE]"]
    assert client.status == 200
    assert client.headers["content-type"].startswith("text/event-stream")
    assert client.headers["cache-control"] == "no-store"
    assert client.headers["x-accel-buffering"] == "no"
    assert "content-length" not in client.headers
    assert not client.messages[-1].get("more_body")
    assert source.num_closed == 1


async def test_a_stream_without_events_is_answered():
    client = Client()
    await client.read(EventStream(Source().events()))
    assert client.events == ["[DONE]"]


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        (UnavailableError("scheduler-0 died"), "scheduler-0 died", "service_unavailable_error"),
        (RequestTimeoutError("it took too long"), "it took too long", "timeout_error"),
        (KeyError("secret"), "the server failed to handle the request", "server_error"),
        (TimeoutError("secret"), "the server failed to handle the request", "server_error"),
    ],
)
async def test_an_error_after_an_event_is_the_last_event(error, message, kind):
    client, source = Client(), Source(b"1", then=error)
    await client.read(EventStream(source.events()))
    first, last, done = client.events
    assert (first, done) == ("1", "[DONE]")
    assert json.loads(last) == {"error": {"message": message, "type": kind, "param": None, "code": None}}
    assert source.num_closed == 1


@pytest.mark.parametrize(("error", "status"), [(UnavailableError("down"), 503), (RequestTimeoutError("late"), 408)])
async def test_an_error_before_the_first_event_has_a_status(error, status):
    app = FastAPI()
    install_error_handlers(app)
    source, closed = Source(then=error), []

    @app.get("/stream")
    async def stream():
        return EventStream(source.events(), close=lambda: closed.append(True))

    client = Client()
    await client.read(app)
    assert client.status == status
    assert json.loads(client.messages[1]["body"])["error"]["message"] == str(error)
    assert ("retry-after" in client.headers) == (status == 503)
    assert source.num_closed == len(closed) == 1


async def test_a_disconnect_during_a_pause_closes_the_source_immediately():
    client, source, closed = Client(), Source(b"1", then="wait"), []
    reading = asyncio.ensure_future(client.read(EventStream(source.events(), close=lambda: closed.append(True))))
    await source.waits.wait()
    assert not closed
    client.leave()
    await reading
    assert source.num_closed == len(closed) == 1
    assert client.events == ["1"]


async def test_a_disconnect_of_a_client_that_does_not_read_closes_the_source():
    client, source, closed = Client(is_slow=True), Source(*[b"1"] * 9, then="wait"), []
    client.leave()
    await client.read(EventStream(source.events(), close=lambda: closed.append(True)))
    assert client.messages == []
    assert source.num_closed == len(closed) == 1


async def test_a_broken_connection_closes_the_source_and_counts_as_a_disconnect():
    client, source = Client(is_broken=True), Source(b"1", then="wait")
    with pytest.raises(ClientDisconnect):
        await client.read(EventStream(source.events()))
    assert source.num_closed == 1


async def test_a_server_that_stops_closes_the_source():
    client, source, closed = Client(), Source(b"1", then="wait"), []
    reading = asyncio.ensure_future(client.read(EventStream(source.events(), close=lambda: closed.append(True))))
    await source.waits.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert source.num_closed == len(closed) == 1


async def test_a_request_is_aborted_even_if_the_server_does_not_wait_for_its_source():
    closed, begun, closing, may_end = [], asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_close():
        try:
            yield b"1"
            begun.set()
            await asyncio.Event().wait()
        finally:
            closing.set()
            await may_end.wait()

    client = Client()
    reading = asyncio.ensure_future(client.read(EventStream(slow_to_close(), close=lambda: closed.append(True))))
    await begun.wait()
    client.leave()
    await closing.wait()
    assert closed == []
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert closed == [True]
    may_end.set()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


async def test_a_request_is_aborted_even_if_its_source_fails_to_close():
    closed = []

    async def clumsy():
        try:
            yield b"1"
            await asyncio.Event().wait()
        finally:
            raise KeyError("lost")

    client = Client(is_slow=True)
    client.leave()
    with pytest.raises(KeyError):
        await client.read(EventStream(clumsy(), close=lambda: closed.append(True)))
    assert closed == [True]


async def test_work_that_ignores_its_cancellation_is_awaited_after_a_disconnect():
    client, begun, done = Client(), asyncio.Event(), []

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            done.append(True)
        return 5

    waiting = asyncio.ensure_future(until_disconnect(Request(SCOPE, client.receive), work()))
    await begun.wait()
    client.leave()
    with pytest.raises(ClientDisconnect):
        await waiting
    assert done == [True]


async def test_the_result_of_finished_work_is_returned_even_after_a_disconnect():
    client = Client()
    client.leave()

    async def work():
        return 5

    assert await until_disconnect(Request(SCOPE, client.receive), work()) == 5


async def test_the_result_of_work_is_returned():
    async def work():
        await asyncio.sleep(0)
        return 5

    assert await until_disconnect(Request(SCOPE, Client().receive), work()) == 5


async def test_an_exception_of_work_is_raised():
    async def work():
        raise UnavailableError("down")

    with pytest.raises(UnavailableError, match="down"):
        await until_disconnect(Request(SCOPE, Client().receive), work())


@pytest.mark.parametrize("ending", [None, UnavailableError("as it was cancelled")])
async def test_work_is_cancelled_on_a_disconnect(ending):
    client, begun, cancelled = Client(), asyncio.Event(), []

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise ending or asyncio.CancelledError from None

    waiting = asyncio.ensure_future(until_disconnect(Request(SCOPE, client.receive), work()))
    await begun.wait()
    client.leave()
    with pytest.raises(ClientDisconnect):
        await waiting
    assert cancelled == [True]
