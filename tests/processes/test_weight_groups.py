"""The receivers of a trainer's group, and calls that overlap."""

import asyncio
import json
import socket

import pytest

from graftlm.config import EngineConfig
from graftlm.errors import EngineError, RequestError
from graftlm.processes import weight_groups
from graftlm.processes.weight_groups import GroupAddress, WeightGroups
from graftlm.processes.weight_receiver import WeightReceiver

ADDRESS = GroupAddress(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, backend="gloo")


def test_an_update_waits_until_the_group_is_joined(monkeypatch):
    calls = []

    async def start(group, address):
        await asyncio.sleep(0.05)

    async def call(group, name, arguments, *, num_waits):
        calls.append(name)
        if name == "receive":
            raise RequestError("received nothing")
        return [None]

    monkeypatch.setattr(weight_groups._Group, "start", start)
    monkeypatch.setattr(weight_groups._Group, "call", call)

    async def run():
        groups = WeightGroups(EngineConfig(), None)
        joined = asyncio.create_task(groups.join("g", ADDRESS))
        await asyncio.sleep(0)
        update = groups.update("g", [], [], [], flush_cache=True, abort_all=False, version=None)
        return await asyncio.gather(joined, update, return_exceptions=True)

    joined, updated = asyncio.run(run())
    assert joined is None
    assert "received nothing" in str(updated)
    assert calls == ["join", "receive"]


def test_each_replica_has_a_receiver(monkeypatch):
    setups = []

    async def start(command, environment, first_line):
        setups.append(json.loads(first_line))
        if len(setups) == 2:
            raise OSError("no more processes")
        return EndlessProcess()

    monkeypatch.setattr(weight_groups.ChildProcess, "start", start)
    address = GroupAddress(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=3, backend="gloo")
    groups = WeightGroups(EngineConfig.load({"parallel": {"data": 2}}), None)
    with pytest.raises(EngineError, match=r"^receiver-1 cannot be started: no more processes$"):
        asyncio.run(groups.join("g", address))
    assert [(setup["name"], setup["index"]) for setup in setups] == [("receiver-0", 0), ("receiver-1", 1)]


class EndlessProcess:
    """A process that runs until it is killed."""

    pid = 1

    def __init__(self):
        self._killed = asyncio.Event()

    async def wait(self):
        await self._killed.wait()
        return -9

    def kill(self):
        self._killed.set()


def test_the_rank_of_a_receiver_is_the_offset_plus_its_index():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(RequestError, match=r"^rank 3 of 5 could not join"):
            WeightReceiver(1).join("127.0.0.1", unused.getsockname()[1], 2, 5, "g", "gloo", 0.01)


class Arriving:
    """A group in which all tensors consist of ones."""

    def broadcast(self, tensor, root):
        tensor.fill_(1)
        return self

    def wait(self, timeout):
        pass


@pytest.mark.parametrize(("index", "keeps"), [(0, True), (1, False)])
def test_only_the_first_receiver_keeps_the_tensors(index, keeps):
    receiver = WeightReceiver(index)
    receiver._group = Arriving()
    received = receiver.receive(["a"], ["float32"], [[2]])
    assert bool(received["path"]) == keeps
    receiver.free()
