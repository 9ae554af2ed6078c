"""Calls of a trainer's group that overlap."""

import asyncio

from graftlm.config import EngineConfig
from graftlm.errors import RequestError
from graftlm.processes import weight_groups
from graftlm.processes.weight_groups import GroupAddress, WeightGroups

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
