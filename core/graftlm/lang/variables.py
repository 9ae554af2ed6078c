"""The variables of a program's states: promised when a line asks for them, kept when it has run."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graftlm.errors import ProgramError, RequestError
from graftlm.lang.call_site import CallSite
from graftlm.lang.text_feed import TextFeed, waker

__all__ = ["Cell", "Promise", "Scope", "Value", "Variables", "arrival", "result_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Value:
    """What a variable holds.

    Attributes:
        value: text; a list of texts when `n` of them were generated; anything that the program put there.
        meta_info: what the backend said of it; one for each of `n`.
    """

    value: Any
    meta_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Scope:
    """A `with s.var_scope(...)` block, as the program's thread has come to it.

    Attributes:
        site: where it begins.
        thread: that runs the block, and so waits for ever if it waits for the block's text.
    """

    name: str
    site: CallSite
    thread: int = field(default_factory=threading.get_ident)
    is_open: bool = True

    def check_readable(self) -> None:
        """Check that the calling thread may wait for the block's text.

        Raises:
            RequestError: it is in the block itself.
        """
        if self.is_open and self.thread == threading.get_ident():
            raise RequestError(
                f"scope {self.name!r} is still open, so its text is not there yet; read it behind its with block\n"
                f"  {self.site}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One variable as one line of the program makes it. A line that runs again makes another.

    Attributes:
        thoughts: the variable of the reasoning that led to this one, where that is kept apart.
        scope: the block whose text it keeps, if it is one's.
    """

    future: "Future[Value]" = field(default_factory=Future)
    feed: TextFeed = field(default_factory=TextFeed)
    thoughts: "Cell | None" = None
    scope: Scope | None = None

    def fill(self, value: Value) -> None:
        """Set the value; of `n` completions, the text to follow is the first, with which the program goes on."""
        self.future.set_result(value)
        text = value.value[0] if isinstance(value.meta_info, list) else value.value
        self.feed.grow(text if isinstance(text, str) else "", value.meta_info)
        self.feed.end()

    def check_readable(self) -> None:
        """Check that the calling thread may wait for the value; raises RequestError as `Scope.check_readable`."""
        has_failed = self.future.done() and self.future.exception() is not None
        if self.scope is not None and not has_failed:
            self.scope.check_readable()

    def fail(self, error: ProgramError) -> None:
        """Have every read raise."""
        if not self.future.done():
            self.future.set_exception(error)
            self.feed.end(error)
        if self.thoughts is not None:
            self.thoughts.fail(error)


@dataclass(frozen=True, slots=True)
class Promise:
    """A return value that is put together of variables once they are there.

    Attributes:
        result: waits for them, and returns the value; raises ProgramError when one failed.
    """

    result: Callable[[], Any]


class Variables:
    """Names to cells, of one state.

    The program's own thread knows which names it has asked for, so for it an unknown name is an error at once. Others
    may look while the program still runs, and wait until it asks for the name, or ends.
    """

    def __init__(self, inherited: Mapping[str, Cell] | None = None, *, is_open: bool = False) -> None:
        """Begin with the variables of the state that this one goes on from; open ones wait for `end`."""
        self._cells = dict(inherited or {})
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._writer: int | None = None
        self._is_open = is_open
        self._error: ProgramError | None = None

    def begin(self) -> None:
        """Take the calling thread for the program's own."""
        self._writer = threading.get_ident()

    def end(self, error: ProgramError | None = None) -> None:
        """The program asks for no more names; with an error, it did not come to those that are not there."""
        with self._changed:
            self._is_open = False
            self._error = error
            self._tell()

    def wait_until_ended(self) -> None:
        """Wait until the program asks for no more names.

        Raises:
            ProgramError: its function failed.
            RequestError: the calling thread is the program's own.
        """
        with self._changed:
            if self._is_open and self._writer == threading.get_ident():
                raise RequestError("the program reads its own ret_value, which is there when its function has returned")
            self._changed.wait_for(lambda: not self._is_open)
            if self._error is not None:
                raise self._error.again()

    def __setitem__(self, name: str, cell: Cell) -> None:
        with self._changed:
            self._cells[name] = cell
            self._tell()

    def __contains__(self, name: object) -> bool:
        with self._changed:
            return name in self._cells

    def __getitem__(self, name: str) -> Cell:
        """Return a variable's cell.

        Raises:
            KeyError: the program does not make such a variable.
            ProgramError: its function failed before it came to one.
        """
        with self._changed:
            while (cell := self._find(name)) is None:
                self._changed.wait()
            return cell

    async def wait_for(self, name: str) -> Cell:
        """Return a variable's cell without blocking the event loop, nor a thread; raises as `[name]`."""
        news = asyncio.Event()
        listener = waker(news)
        with self._changed:
            self._listeners.append(listener)
        try:
            while (cell := self._find(name)) is None:
                await news.wait()
                news.clear()  # before the next look: what comes behind that sets it again
            return cell
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def copy(self) -> dict[str, Cell]:
        """Return the names and cells as of now."""
        with self._changed:
            return dict(self._cells)

    def _find(self, name: str) -> Cell | None:
        """Return a variable's cell, None while the program may still ask for one; raises as `[name]`."""
        with self._changed:
            if name in self._cells:
                return self._cells[name]
            if self._error is not None:
                raise self._error.again()
            if not self._is_open or self._writer == threading.get_ident():
                known = ", ".join(sorted(self._cells)) or "none"
                raise KeyError(f"this program's state has no variable {name!r}; it has: {known}")
            return None

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()


def result_of(future: "Future[Any]") -> Any:
    """Wait for a future.

    Raises:
        ProgramError: the program failed; a new one each time, since reads in several threads share the future.
    """
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ProgramError):
        raise error.again()
    raise error


async def arrival(future: "Future[T]") -> T:
    """Wait for a future that is set in this very event loop; one that waits and is cancelled leaves it as it is."""
    ready = asyncio.Event()
    future.add_done_callback(lambda _: ready.set())
    await ready.wait()
    return future.result()
