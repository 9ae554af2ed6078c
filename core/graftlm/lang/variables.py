"""The variables of a program's states.

A variable is created when its expression is appended to the state, and filled when the expression has run.
"""

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
    """The content of a variable.

    Attributes:
        value: text; a list of texts if `n` texts were generated; or any object that the program has set.
        meta_info: the backend's meta information; a list if `n` texts were generated.
    """

    value: Any
    meta_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Scope:
    """A `with s.var_scope(...)` block.

    Attributes:
        site: the line where it begins.
        thread: id of the thread that runs the block. This thread must not wait for the block's text inside the block.
        is_open: whether the block has not ended.
    """

    name: str
    site: CallSite
    thread: int = field(default_factory=threading.get_ident)
    is_open: bool = True

    def check_readable(self) -> None:
        """Check that the calling thread may wait for the block's text.

        Raises:
            RequestError: the thread is inside the block.
        """
        if self.is_open and self.thread == threading.get_ident():
            raise RequestError(
                f"scope {self.name!r} is still open, so its text is not complete; read it after the with block\n"
                f"  {self.site}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """The future value of one variable. If the program sets the variable again, it gets a new cell.

    Attributes:
        reasoning: the cell of the reasoning before this text, if the reasoning is separated from the text.
        scope: the `var_scope` block whose text is the value, if any.
    """

    future: "Future[Value]" = field(default_factory=Future)
    feed: TextFeed = field(default_factory=TextFeed)
    reasoning: "Cell | None" = None
    scope: Scope | None = None

    def fill(self, value: Value) -> None:
        """Set the value. If there are `n` completions, the feed has the first one."""
        self.future.set_result(value)
        text = value.value[0] if isinstance(value.meta_info, list) else value.value
        self.feed.grow(text if isinstance(text, str) else "", value.meta_info)
        self.feed.end()

    def check_readable(self) -> None:
        """Check that the calling thread may wait for the value; raises like `Scope.check_readable`."""
        has_failed = self.future.done() and self.future.exception() is not None
        if self.scope is not None and not has_failed:
            self.scope.check_readable()

    def fail(self, error: ProgramError) -> None:
        """Set an error, which every read will raise."""
        if not self.future.done():
            self.future.set_exception(error)
            self.feed.end(error)
        if self.reasoning is not None:
            self.reasoning.fail(error)


@dataclass(frozen=True, slots=True)
class Promise:
    """A return value that is built from variables when they are available.

    Attributes:
        result: function that waits for the variables and returns the value; raises ProgramError if one failed.
    """

    result: Callable[[], Any]


class Variables:
    """The cells of one state, by variable name.

    In the program's own thread, an unknown name is immediately an error, because this thread creates the variables.
    Other threads wait until the program creates the variable or ends.
    """

    def __init__(self, inherited: Mapping[str, Cell] | None = None, *, is_open: bool = False) -> None:
        """Begin with the variables of the state that the new state continues. If `is_open`, reads wait until `end`."""
        self._cells = dict(inherited or {})
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._writer: int | None = None
        self._is_open = is_open
        self._error: ProgramError | None = None

    def begin(self) -> None:
        """Register the calling thread as the program's own."""
        self._writer = threading.get_ident()

    def end(self, error: ProgramError | None = None) -> None:
        """Record that the program creates no more variables. Reads of unknown names then raise `error`, if given."""
        with self._changed:
            self._is_open = False
            self._error = error
            self._notify()

    def wait_until_ended(self) -> None:
        """Wait until the program creates no more variables.

        Raises:
            ProgramError: the program's function failed.
            RequestError: the calling thread is the program's own.
        """
        with self._changed:
            if self._is_open and self._writer == threading.get_ident():
                raise RequestError("a program cannot read its own ret_value before its function has returned")
            self._changed.wait_for(lambda: not self._is_open)
            if self._error is not None:
                raise self._error.again()

    def __setitem__(self, name: str, cell: Cell) -> None:
        with self._changed:
            self._cells[name] = cell
            self._notify()

    def __contains__(self, name: object) -> bool:
        with self._changed:
            return name in self._cells

    def __getitem__(self, name: str) -> Cell:
        """Return a variable's cell.

        Raises:
            KeyError: the program has no such variable.
            ProgramError: the program's function failed before it created the variable.
        """
        with self._changed:
            while (cell := self._find(name)) is None:
                self._changed.wait()
            return cell

    async def wait_for(self, name: str) -> Cell:
        """Return a variable's cell without blocking the event loop or a thread; raises like `[name]`."""
        news = asyncio.Event()
        listener = waker(news)
        with self._changed:
            self._listeners.append(listener)
        try:
            while (cell := self._find(name)) is None:
                await news.wait()
                news.clear()  # before the next look-up: a later change sets it again
            return cell
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def copy(self) -> dict[str, Cell]:
        """Return the current names and cells."""
        with self._changed:
            return dict(self._cells)

    def _find(self, name: str) -> Cell | None:
        """Return a variable's cell; None if the program may still create it; raises like `[name]`."""
        with self._changed:
            if name in self._cells:
                return self._cells[name]
            if self._error is not None:
                raise self._error.again()
            if not self._is_open or self._writer == threading.get_ident():
                known = ", ".join(sorted(self._cells)) or "none"
                raise KeyError(f"this program's state has no variable {name!r}; it has: {known}")
            return None

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()


def result_of(future: "Future[Any]") -> Any:
    """Wait for a future and return its result.

    Raises:
        ProgramError: the program failed. Each call raises a new object, because several threads may read the future.
    """
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ProgramError):
        raise error.again()
    raise error


async def arrival(future: "Future[T]") -> T:
    """Wait for a future that code in this event loop sets. Cancelling the wait does not cancel the future."""
    ready = asyncio.Event()
    future.add_done_callback(lambda _: ready.set())
    await ready.wait()
    return future.result()
