"""Every replica gets new weights; a replica without them takes no requests."""

import asyncio
from types import SimpleNamespace

import pytest

from graftlm import EngineConfig
from graftlm.errors import RequestError, UnavailableError
from graftlm.processes.messages import Call, Reply
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.tokenizer_manager import TokenizerManager

NAMES = ["scheduler-0", "scheduler-1"]


class Servers:
    """Answers calls as two replicas do.

    Attributes:
        refusals: process -> the reason why it refuses an update.
    """

    def __init__(self):
        self.calls, self.refusals = [], {}
        replicas = ReplicaSet(NAMES, can_recover=True)
        model = SimpleNamespace(vocab_size=10, context_len=10)
        self.manager = TokenizerManager(
            EngineConfig.load({"parallel": {"data": 2}}), model, None, None, replicas, self.send, metrics=None
        )
        for name in NAMES:
            self.manager.process_ready(name)

    def send(self, process, message):
        assert isinstance(message, Call)
        self.calls.append((process, message.name, message.arguments))
        reply = Reply(process=process, call_id=message.call_id, error=self.refusals.get(process))
        asyncio.get_running_loop().call_soon(self.manager.receive, reply)

    async def update(self, **fields):
        arguments = {"flush_cache": True, "abort_all": False, "version": None} | fields
        return await self.manager.weights.update("/new", None, **arguments)


@pytest.fixture
def servers():
    it = Servers()
    yield it
    it.manager.close()


async def test_every_replica_is_updated_and_the_version_is_reported(servers):
    assert await servers.update(version="two") == 0
    arguments = {"path": "/new", "tensors": None, "flush_cache": True}
    assert servers.calls == [(name, "update_weights", arguments) for name in NAMES]
    assert servers.manager.weights.version == "two"
    await servers.update()
    assert servers.manager.weights.version == "two"


async def test_after_a_refusal_by_every_replica_all_serve_the_old_weights(servers):
    servers.refusals = dict.fromkeys(NAMES, "it lacks 'x'")
    with pytest.raises(RequestError, match="it lacks 'x'"):
        await servers.update(version="two")
    assert servers.manager.health.problems == ()
    assert len(servers.manager.replicas.ready) == 2
    assert servers.manager.weights.version == "default"


async def test_a_replica_that_fails_alone_takes_no_requests_until_an_update_succeeds(servers):
    servers.refusals = {"scheduler-1": "no memory"}
    with pytest.raises(UnavailableError, match=r"1 of 2 replicas have the new weights. .*scheduler-1: no memory"):
        await servers.update(version="two")
    assert servers.manager.weights.version == "two"  # the version of scheduler-0's later answers
    assert [replica.name for replica in servers.manager.replicas.ready] == ["scheduler-0"]
    servers.refusals = {}
    await servers.update()
    assert len(servers.manager.replicas.ready) == 2


async def test_a_replica_that_restarts_after_an_update_is_outdated(servers):
    servers.manager.process_died("scheduler-0", "exit status 1")
    servers.manager.process_ready("scheduler-0")
    assert len(servers.manager.replicas.ready) == 2
    await servers.update()
    servers.manager.process_died("scheduler-0", "exit status 1")
    servers.manager.process_ready("scheduler-0")
    assert "scheduler-0 does not have the current weights" in servers.manager.health.problems[0]
    await servers.update()
    assert servers.manager.health.problems == ()


async def test_a_replica_that_restarts_during_an_update_is_outdated(servers):
    servers.manager.process_died("scheduler-1", "exit status 1")
    updating = asyncio.ensure_future(servers.update())
    async with asyncio.timeout(10):
        while not servers.calls:
            await asyncio.sleep(0)
    assert [process for process, *_ in servers.calls] == ["scheduler-0"]
    servers.manager.process_ready("scheduler-1")  # with the weights of the configuration
    await updating
    assert [replica.name for replica in servers.manager.replicas.ready] == ["scheduler-0"]
    assert "scheduler-1 does not have the current weights" in servers.manager.health.problems[0]


async def test_without_a_replica_an_update_is_an_error_with_the_reason(servers):
    for name in NAMES:
        servers.manager.process_died(name, "exit status 1")
    with pytest.raises(UnavailableError, match="scheduler-0 died"):
        await servers.update()
