"""Merging of several streams into one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

__all__ = ["interleave"]

T = TypeVar("T")


async def interleave(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Yield (index of the stream, its item) in the order in which the items arrive.

    The next item of a stream is requested only after its previous one was consumed. So a stream that joins its pending
    items gives a slow reader fewer and larger ones.

    Raises:
        Exception: the first one that a stream raises; it ends all streams.
    """
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    pending = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                items = task.result()
                if items:
                    pending[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, items[0]
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _next(stream: AsyncIterator[T]) -> tuple[T, ...]:
    """Return a tuple of the next item; an empty one at the end of the stream."""
    async for item in stream:
        return (item,)
    return ()
