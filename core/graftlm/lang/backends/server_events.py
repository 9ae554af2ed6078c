"""A reader of server-sent events."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

__all__ = ["server_events"]

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
