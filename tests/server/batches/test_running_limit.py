"""Fewer requests of a batch run beside other requests."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from graftlm.server.batches.running_limit import RunningLimit


class World:
    """A clock, and the number of other requests."""

    def __init__(self, beside=2):
        self.now_s, self.others = 100.0, 0
        self.limit = RunningLimit(4, beside, lambda: self.others, lambda: self.now_s)
        self.stack = AsyncExitStack()

    async def enter(self):
        """Take a slot; returns whether there was one."""
        try:
            await asyncio.wait_for(self.stack.enter_async_context(self.limit.slot()), 0.2)
        except TimeoutError:
            return False
        return True


@pytest.fixture
async def world():
    it = World()
    async with it.stack:
        yield it


async def test_alone_the_higher_limit_holds(world):
    assert [await world.enter() for _ in range(5)] == [True] * 4 + [False]


async def test_beside_others_the_lower_limit_holds_and_for_a_second_after(world):
    world.others = 1
    assert [await world.enter() for _ in range(3)] == [True, True, False]
    world.others = 0
    world.now_s += 0.9
    assert not await world.enter()
    world.now_s += 0.2
    assert await world.enter()


async def test_a_freed_slot_is_taken_by_one_that_waits(world):
    world.others = 1
    await world.enter()
    async with world.limit.slot():
        waiting = asyncio.ensure_future(world.enter())
        await asyncio.sleep(0)
    assert await waiting


async def test_with_a_limit_of_zero_one_request_runs_every_five_seconds():
    world = World(beside=0)
    world.others = 1
    async with world.stack:
        assert not await world.enter()
        world.now_s += 5
        assert [await world.enter() for _ in range(2)] == [True, False]
