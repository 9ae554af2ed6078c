"""A text that grows in the language's event loop; threads and other loops can follow it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from graftlm.errors import ProgramError

__all__ = ["TextFeed", "waker"]


class TextFeed:
    """A text that grows by `append` until `end`. Only one thread at a time may change it; any thread may read it."""

    def __init__(self, text: str = "") -> None:
        self._now: tuple[str, Any] = (text, {})  # text and meta information, replaced together: readers need no lock
        self._ended = False
        self._error: ProgramError | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return self._now[0]

    def append(self, text: str, meta_info: Any = None) -> None:
        """Add text. `meta_info` is the meta information of the whole text so far; None leaves it unchanged."""
        old_text, old_meta_info = self._now
        self._now = (old_text + text, old_meta_info if meta_info is None else meta_info)
        if text:
            self._notify()

    def grow(self, text: str, meta_info: Any = None) -> None:
        """Set the whole text, which must begin with the text so far; see `append`."""
        self.append(text[len(self.text) :], meta_info)

    def end(self, error: ProgramError | None = None) -> None:
        """End the text. Readers get the error, if any, after the text. Later calls have no effect."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._notify()

    def chunks(self) -> Iterator[str]:
        """Yield the text in pieces as it grows, from the beginning."""
        news = threading.Event()
        self._listeners.append(news.set)
        try:
            at = 0
            while True:
                news.clear()
                ended = self._ended  # read before the text, so that text added in between is not missed
                text = self.text
                if len(text) > at:
                    yield text[at:]
                    at = len(text)
                elif ended:
                    break
                else:
                    news.wait()
        finally:
            self._listeners.remove(news.set)
        self._raise()

    async def achunks(self) -> AsyncGenerator[str, None]:
        """Yield the text in pieces, in the caller's event loop."""
        async with aclosing(self.achunks_with_meta()) as pairs:
            async for piece, _ in pairs:
                yield piece

    async def achunks_with_meta(self) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield pieces like `achunks`, each with the meta information of the text so far."""
        news = asyncio.Event()
        listener = waker(news)
        self._listeners.append(listener)
        try:
            at = 0
            while True:
                news.clear()
                ended = self._ended
                text, meta_info = self._now
                if len(text) > at:
                    yield text[at:], meta_info
                    at = len(text)
                elif ended:
                    break
                else:
                    await news.wait()
        finally:
            self._listeners.remove(listener)
        self._raise()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error.again()


def waker(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of the calling event loop; any thread may call it."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    return wake
