"""The probe behind /health_generate generates one token for any number of concurrent callers."""

import asyncio
from types import SimpleNamespace

import pytest

from graftlm.errors import UnavailableError
from graftlm.server.native.generation_probe import GenerationProbe


class FakeManager:
    """Generates when `go` is set, and counts its calls."""

    def __init__(self):
        self.go = asyncio.Event()
        self.num_started = 0
        self.error = None
        self.health = SimpleNamespace(paused=False, sleeping=False, problems=())
        self.model = SimpleNamespace(generates=True)
        self.replicas = SimpleNamespace(replicas=[])

    async def prepare(self, *args, **kwargs):
        self.num_started += 1
        if self.error is not None:
            raise self.error

    async def start(self, request):
        return SimpleNamespace(ended=self.go.wait, abort=lambda: None)


@pytest.fixture
async def manager():
    return FakeManager()


@pytest.fixture
def clock():
    clock = SimpleNamespace(now_s=5.0)
    clock.read = lambda: clock.now_s
    return clock


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_concurrent_callers_and_those_of_the_next_second_share_one_token(manager, clock):
    probe = GenerationProbe(manager, clock.read)
    callers = [asyncio.create_task(probe.problem()) for _ in range(700)]
    await until(lambda: manager.num_started)
    manager.go.set()
    assert set(await asyncio.gather(*callers)) == {None}
    clock.now_s += 0.9
    assert await probe.problem() is None
    assert manager.num_started == 1
    clock.now_s += 0.2
    assert await probe.problem() is None
    assert manager.num_started == 2


async def test_a_cancelled_caller_does_not_end_the_probe_of_others(manager, clock):
    probe = GenerationProbe(manager, clock.read)
    first = asyncio.create_task(probe.problem())
    await until(lambda: manager.num_started)
    second = asyncio.create_task(probe.problem())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    manager.go.set()
    assert await second is None
    assert manager.num_started == 1


async def test_a_problem_is_shared_and_cached_for_a_second(manager, clock):
    probe = GenerationProbe(manager, clock.read)
    manager.error = UnavailableError("no replica")
    assert [await probe.problem(), await probe.problem()] == ["no replica"] * 2
    assert manager.num_started == 1
    manager.error = None
    manager.go.set()
    clock.now_s += 1
    assert await probe.problem() is None


async def test_a_pause_is_reported_immediately(manager, clock):
    probe = GenerationProbe(manager, clock.read)
    manager.go.set()
    assert await probe.problem() is None
    manager.health.paused = True
    assert await probe.problem() == "generation is paused"
    manager.health.sleeping, manager.health.problems = True, ("the server sleeps",)
    assert await probe.problem() == "the server sleeps"
