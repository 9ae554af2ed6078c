"""A reader of server-sent events, and the start of a stream of them."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from graftlm.errors import UnavailableError

__all__ = ["server_events", "started"]

_LAST = b"[DONE]"


async def server_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Yield the JSON of each event, up to `[DONE]`. An event may have any length, and span several chunks."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == _LAST:
                return
            yield json.loads(data)


async def started(
    events: AsyncGenerator[dict[str, Any], None],
) -> tuple[dict[str, Any], AsyncGenerator[dict[str, Any], None]]:
    """Return a stream's first event and a generator of the other events.

    The first event shows that the request was accepted.

    Raises:
        UnavailableError: the stream has no event.
    """
    try:
        return await anext(events), events
    except StopAsyncIteration:
        raise UnavailableError("the server ended a stream without an event") from None
