"""Merging of several streams into one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

__all__ = ["interleave"]

T = TypeVar("T")


async def interleave(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Yield (index of the stream, item) in the order in which the items arrive.

    The next item of a stream is requested only after the caller has consumed the previous one. A stream that joins its
    pending items therefore yields fewer and larger items to a slow reader.

    Raises:
        Exception: the first exception of a stream; it ends all streams.
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
    """Return a tuple with the next item; an empty tuple at the end of the stream."""
    async for item in stream:
        return (item,)
    return ()
