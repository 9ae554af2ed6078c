"""The main process's list of adapters: either all replicas have an adapter, or none has it."""

import asyncio

import pytest

from graftlm.errors import AdapterError, AdapterNotFoundError, RequestError, UnavailableError
from graftlm.processes.calls import ProcessCalls
from graftlm.processes.messages import Reply
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.served_adapters import ServedAdapters

NAMES = ["scheduler-0", "scheduler-1"]


class Rig:
    """Served adapters with two replicas, whose answers the test gives."""

    def __init__(self):
        self.sent = []
        self.replicas = ReplicaSet(NAMES, can_recover=True)
        for name in (*NAMES, "detokenizer"):
            self.replicas.started(name)
        self.calls = ProcessCalls(self.replicas, self._send)
        self.adapters = ServedAdapters(
            {"sql": "/sql"}, {"sql": "0s"}, self.calls, self.replicas, self._send, lambda: 7.0
        )

    def _send(self, process, call):
        self.sent.append((process, call))

    def take_sent(self):
        """Return the calls since the last time: process, name of the call and its arguments."""
        sent, self.sent = self.sent, []
        return [(process, call.name, call.arguments) for process, call in sent]

    def answer(self, *errors, values=(0, 0)):
        """Answer the latest calls; None means success."""
        for (process, call), error, value in zip(self.sent, errors, values[: len(errors)], strict=True):
            self.calls.answer(Reply(process=process, call_id=call.call_id, value=value, error=error))
        self.sent = []

    async def begin(self, coroutine):
        """Start a change, and run until it waits for the replicas."""
        task = asyncio.ensure_future(coroutine)
        while not self.sent and not task.done():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


@pytest.fixture
async def rig():
    return Rig()


async def test_an_adapter_is_served_after_every_replica_has_loaded_it(rig):
    task = await rig.begin(rig.adapters.load("chat", "/chat"))
    assert [(process, call.name, call.arguments) for process, call in rig.sent] == [
        (name, "load_adapter", {"name": "chat", "path": "/chat"}) for name in NAMES
    ]
    assert list(rig.adapters) == ["sql"]
    rig.answer(None, None)
    await task
    assert rig.adapters.paths == {"sql": "/sql", "chat": "/chat"}
    assert rig.adapters["chat"].loaded_s == 7


async def test_if_a_replica_refuses_an_adapter_the_others_unload_it(rig):
    task = await rig.begin(rig.adapters.load("chat", "/chat"))
    rig.answer(None, "rank 9 is too much")
    with pytest.raises(RequestError, match="rank 9"):
        await task
    assert rig.take_sent() == [("scheduler-0", "unload_adapter", {"name": "chat"})]
    assert list(rig.adapters) == ["sql"]


async def test_a_replica_that_dies_while_loading_fails_the_load(rig):
    task = await rig.begin(rig.adapters.load("chat", "/chat"))
    rig.calls.process_died("scheduler-1", "scheduler-1 died")
    rig.calls.answer(Reply(process="scheduler-0", call_id=rig.sent[0][1].call_id))
    rig.sent = []
    with pytest.raises(UnavailableError, match="scheduler-1 died"):
        await task
    assert [process for process, _, _ in rig.take_sent()] == NAMES


async def test_an_adapter_takes_no_requests_while_it_is_unloaded(rig):
    rig.adapters.check("sql")
    task = await rig.begin(rig.adapters.unload("sql"))
    with pytest.raises(AdapterNotFoundError):
        rig.adapters.check("sql")
    rig.answer(None, None)
    assert await task == 0
    with pytest.raises(AdapterNotFoundError, match="Loaded: none"):
        await rig.adapters.unload("sql")


@pytest.mark.parametrize(
    ("name", "message"), [("sql", "'sql' is already loaded from /sql"), ("a:b", "an adapter's name")]
)
async def test_an_invalid_or_used_name_is_refused_before_any_call(rig, name, message):
    with pytest.raises(AdapterError, match=message):
        await rig.adapters.load(name, "/x")
    assert not rig.sent


async def test_a_restarted_replica_gets_the_served_adapters_with_their_digests(rig):
    sql, chat = {"path": "/sql", "digest": "0s"}, {"path": "/chat", "digest": "0c"}
    rig.adapters.restarted("scheduler-1")
    assert rig.take_sent() == [("scheduler-1", "set_adapters", {"adapters": {"sql": sql}})]
    task = await rig.begin(rig.adapters.load("chat", "/chat"))
    rig.answer(None, None, values=("0c", "0c"))
    await task
    rig.adapters.restarted("scheduler-1")
    assert rig.take_sent() == [("scheduler-1", "set_adapters", {"adapters": {"sql": sql, "chat": chat}})]
    for name in ("sql", "chat"):
        task = await rig.begin(rig.adapters.unload(name))
        rig.answer(None, None)
        await task
    rig.adapters.restarted("scheduler-1")
    assert not rig.sent


async def test_if_replicas_read_different_contents_all_unload_the_adapter(rig):
    task = await rig.begin(rig.adapters.load("chat", "/chat"))
    rig.answer(None, None, values=("0c", "0d"))
    with pytest.raises(AdapterError, match="have read 2 different adapters from /chat"):
        await task
    assert rig.take_sent() == [(name, "unload_adapter", {"name": "chat"}) for name in NAMES]
    assert list(rig.adapters) == ["sql"]


async def test_a_cancelled_load_is_undone(rig):
    task = await rig.begin(rig.adapters.load("chat", "/chat"))
    rig.sent = []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.take_sent() == [(name, "unload_adapter", {"name": "chat"}) for name in NAMES]


async def test_a_replica_that_starts_during_a_load_gets_the_adapters_too(rig):
    rig.replicas.died("scheduler-1", "a signal")
    task = await rig.begin(rig.adapters.load("chat", "/chat"))
    rig.replicas.started("scheduler-1")
    rig.answer(None)
    await task
    assert [(process, name) for process, name, _ in rig.take_sent()] == [("scheduler-1", "set_adapters")]


async def test_without_a_replica_a_load_is_refused(rig):
    for name in NAMES:
        rig.replicas.died(name, "a signal")
    with pytest.raises(UnavailableError, match="scheduler-0 died"):
        await rig.adapters.load("chat", "/chat")
