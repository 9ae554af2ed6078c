import asyncio

import pytest

from graftlm.server.interleave import interleave


class Stream:
    """Yields the items that a test puts into it; None ends it, and an exception is raised."""

    def __init__(self, *items):
        self.queue = asyncio.Queue()
        for item in items:
            self.queue.put_nowait(item)

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = await self.queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item


async def collect(*streams):
    return [item async for item in interleave(streams)]


async def test_no_streams_yield_nothing():
    assert await collect() == []


async def test_one_stream_keeps_its_order():
    assert await collect(Stream("a", "b", None)) == [(0, "a"), (0, "b")]


async def test_every_item_is_yielded_once_and_each_stream_keeps_its_order():
    items = await collect(Stream("a", "b", "c", None), Stream(None), Stream("x", "y", None))
    assert [item for index, item in items if index == 0] == ["a", "b", "c"]
    assert [item for index, item in items if index == 2] == ["x", "y"]
    assert len(items) == 5


async def test_a_silent_stream_delays_no_other():
    silent, lively = Stream(), Stream("a", "b")
    merged = interleave([silent, lively])
    assert [await anext(merged), await anext(merged)] == [(1, "a"), (1, "b")]
    silent.queue.put_nowait("late")
    assert await anext(merged) == (0, "late")
    await merged.aclose()


async def test_an_exception_of_one_stream_ends_all():
    with pytest.raises(ValueError, match="broken"):
        await collect(Stream("a"), Stream(ValueError("broken")))


async def test_closing_early_leaves_no_task_running():
    merged = interleave([Stream("a"), Stream()])
    await anext(merged)
    await merged.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
