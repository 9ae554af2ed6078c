"""Serves an aiohttp application on a free port, in a separate thread."""

import asyncio
import threading
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

__all__ = ["AppServer"]

_TIMEOUT_S: Final = 30.0


class AppServer:
    """A server that serves an application until `close`. A handler is cancelled when its client disconnects.

    Attributes:
        url: address of the server.
    """

    def __init__(self, app: web.Application) -> None:
        """Start the server."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="graftlm-app-server", daemon=True)
        self._thread.start()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = f"http://127.0.0.1:{self._wait_for(self._start())}"

    def close(self) -> None:
        """Stop the server and abort requests in progress."""
        self._wait_for(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_TIMEOUT_S)

    async def _start(self) -> int:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port: int = self._runner.addresses[0][1]
        return port
