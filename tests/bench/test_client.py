"""Against servers with faults, failures have the right kind, and arrivals wait only for the concurrency limit."""

import asyncio
import time

import numpy as np
import pytest
from aiohttp import web

from graftlm.bench.apis import API_TYPES, RequestOptions
from graftlm.bench.client import Client, open_session
from graftlm.bench.lag import LagMonitor
from graftlm.bench.load import LoadObserver, LoadPlan, run_load
from graftlm.bench.prompts import TextPrompt, WorkItem

TOKEN = b'data: {"meta_info": {"completion_tokens": %d, "finish_reason": null}}\n\n'
END = b'data: {"meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}}}\n\ndata: [DONE]\n\n'


async def load(url, num=1, timeout_s=20.0, observer=None, **plan):
    """Send requests to a server; return their records."""
    async with open_session(None, timeout_s) as session:
        client = Client(session, url, API_TYPES["native"](RequestOptions("m", 0.0, True)))
        requests = [client.prepare(i, WorkItem(TextPrompt("a"), 2)) for i in range(num)]
        return await run_load(client, LoadPlan(requests, **plan), observer)


def streaming(*pieces, cut=False):
    """Return a handler that sends these bytes, and may then break the connection."""

    async def handle(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if cut:
            request.transport.abort()
        return response

    return handle


def refusing(status, text):
    async def handle(request):
        return web.Response(status=status, text=text)

    return handle


async def hanging(request):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(TOKEN % 1)
    await asyncio.sleep(60)
    return response


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (refusing(429, '{"error": {"message": "the queue is full"}}'), "http 429", "the queue is full"),
        (refusing(502, "<html>Bad gateway</html>"), "http 502", "<html>Bad gateway</html>"),
        (streaming(TOKEN % 1, cut=True), "disconnect", ""),
        (streaming(TOKEN % 1), "stream", "ended before the answer was complete"),
        (streaming(TOKEN % 1, b'data: {"error": {"message": "lost"}}\n\n', b"data: [DONE]\n\n"), "stream", "lost"),
        (streaming(b"data: oops\n\n", END), "stream", "an event cannot be read: JSON is malformed"),
        (streaming(), "stream", "ended before the answer was complete"),
        (streaming(b'data: {"meta_info": {"finish_reason": {"type": "abort"}}}\n\n'), "stream", "aborted the request"),
    ],
)
async def test_a_failure_has_a_kind_and_the_servers_message(misbehaving, handler, kind, message):
    (record,) = await load(await misbehaving(handler))
    assert record.failure is not None
    assert record.failure.kind == kind
    assert message in record.failure.message
    assert record.e2e_s is None
    assert 0 <= record.sent_s <= record.end_s


async def test_no_connection_is_a_failure(refused_url):
    (record,) = await load(refused_url)
    assert record.failure is not None
    assert record.failure.kind == "connect"
    assert "Cannot connect" in record.failure.message


async def test_an_answer_that_takes_too_long_is_a_failure(misbehaving):
    (record,) = await load(await misbehaving(hanging), timeout_s=0.2)
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == ("timeout", "not complete after 0.2 s")
    assert (record.num_chunks, record.output_tokens) == (1, 1)


async def test_the_times_of_an_answer_add_up(misbehaving):
    gate = asyncio.Event()

    async def handle(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(TOKEN % 1)
        await gate.wait()
        await response.write(END)
        return response

    async def open_gate():
        await asyncio.sleep(0.05)
        gate.set()

    records, _ = await asyncio.gather(load(await misbehaving(handle)), open_gate())
    (record,) = records
    assert record.failure is None
    assert record.chunk_tokens == [1, 1]
    assert record.finish_reason == "length"
    (gap,) = record.gaps_s
    assert 0 < record.ttft_s < record.last_token_s <= record.e2e_s
    assert record.last_token_s == pytest.approx(record.ttft_s + gap)
    assert record.tpot_s == pytest.approx(gap)
    assert record.end_s == pytest.approx(record.sent_s + record.e2e_s)


class Gate:
    """A server that answers all requests as soon as the awaited number of requests has arrived."""

    def __init__(self, wanted):
        self.wanted = wanted
        self.arrived = 0
        self.in_flight = 0
        self.most = 0
        self._opened = asyncio.Event()

    async def handle(self, request):
        self.arrived += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        if self.arrived >= self.wanted:
            self._opened.set()
        await self._opened.wait()
        await asyncio.sleep(0)
        self.in_flight -= 1
        return await streaming(END)(request)


async def test_slow_answers_do_not_delay_arrivals(misbehaving):
    gate = Gate(wanted=20)  # no request is answered before the last one arrives
    records = await load(await misbehaving(gate.handle), num=20, arrivals_s=np.arange(20) * 0.005)
    assert [r.failure for r in records] == [None] * 20
    assert gate.most == 20
    assert [r.scheduled_s for r in records] == pytest.approx([0.005 * i for i in range(20)])
    assert all(r.client_queue_s >= 0 for r in records)


async def test_the_wait_at_the_concurrency_limit_is_recorded(misbehaving):
    gate = Gate(wanted=3)
    records = await load(await misbehaving(gate.handle), num=12, arrivals_s=np.zeros(12), concurrency=3)
    assert gate.most == 3
    by_end = sorted(r.end_s for r in records)
    for waiting, left in zip(records[3:], by_end, strict=False):
        assert waiting.sent_s >= left
        assert waiting.client_queue_s == pytest.approx(waiting.sent_s)


async def test_a_closed_loop_has_no_schedule_and_a_burst_is_due_at_time_zero(misbehaving):
    url = await misbehaving(streaming(END))
    assert {r.scheduled_s for r in await load(url, num=4, concurrency=2)} == {None}
    assert {r.scheduled_s for r in await load(url, num=4)} == {0.0}


async def test_records_are_in_order_of_arrival_and_the_observer_gets_all(misbehaving):
    heard = []
    observer = LoadObserver(sent=lambda: heard.append("sent"), ended=lambda record: heard.append(record.index))
    records = await load(await misbehaving(streaming(TOKEN % 1, END)), num=6, observer=observer)
    assert [r.index for r in records] == list(range(6))
    assert heard.count("sent") == 6
    assert sorted(i for i in heard if i != "sent") == list(range(6))


async def test_a_blocked_event_loop_is_measured_as_lag():
    async with LagMonitor() as idle:
        await asyncio.sleep(0.05)
    async with LagMonitor() as busy:
        await asyncio.sleep(0.02)
        end_s = time.perf_counter() + 0.1
        while time.perf_counter() < end_s:
            pass
        await asyncio.sleep(0.02)
    assert len(idle.lags_s) >= 1
    assert max(busy.lags_s) >= 0.08
    assert busy.cpu_share > idle.cpu_share
