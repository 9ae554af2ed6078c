"""A text that grows in the language's event loop, and those who follow it from threads and other loops."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from graftlm.errors import ProgramError

__all__ = ["TextFeed", "waker"]


class TextFeed:
    """Grows by `append` until `end`. Both are called by one thread at a time; following is safe from any."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._meta_info: Any = {}
        self._ended = False
        self._error: ProgramError | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def text(self) -> str:
        """Everything so far."""
        return self._text

    def append(self, text: str, meta_info: Any = None) -> None:
        """Add text; `meta_info` is what is known of all of it by now, None where that stays as it was."""
        if meta_info is not None:
            self._meta_info = meta_info
        if text:
            self._text += text
            self._tell()

    def grow(self, text: str, meta_info: Any = None) -> None:
        """Add what a text that begins with everything so far has besides; see `append`."""
        self.append(text[len(self._text) :], meta_info)

    def end(self, error: ProgramError | None = None) -> None:
        """Add no more; followers get the error, if there is one, behind the text. Only the first call counts."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._tell()

    def chunks(self) -> Iterator[str]:
        """Yield the text in pieces as it grows, from the beginning."""
        news = threading.Event()
        self._listeners.append(news.set)
        try:
            at = 0
            while True:
                news.clear()
                ended = self._ended  # before the text: what comes between the two is then not missed
                text = self._text
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

    async def achunks(self) -> AsyncIterator[str]:
        """Yield the text in pieces, in the caller's event loop."""
        news = asyncio.Event()
        listener = waker(news)
        self._listeners.append(listener)
        try:
            at = 0
            while True:
                news.clear()
                ended = self._ended
                text = self._text
                if len(text) > at:
                    yield text[at:]
                    at = len(text)
                elif ended:
                    break
                else:
                    await news.wait()
        finally:
            self._listeners.remove(listener)
        self._raise()

    async def achunks_with_meta(self) -> AsyncIterator[tuple[str, Any]]:
        """Yield pieces as `achunks`, each with what is known of the text by then; the last one with all of it."""
        told = None
        async for chunk in self.achunks():
            told = self._meta_info
            yield chunk, told
        if told is not self._meta_info:
            yield "", self._meta_info

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error.again()


def waker(event: asyncio.Event) -> Callable[[], None]:
    """Return what sets an event of the calling event loop, from any thread."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    return wake
