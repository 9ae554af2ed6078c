"""What a program writes to and reads from: its state, which forks into a group of them."""

import operator
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, Literal, Self, overload

from graftlm.errors import ProgramCancelledError, ProgramError, RequestError
from graftlm.lang import expressions as ex
from graftlm.lang.call_site import CallSite, call_site, function_error
from graftlm.lang.expressions import Expr, as_expr
from graftlm.lang.interpreter import Interpreter, RunContext
from graftlm.lang.steps import End, Snapshot, Take, TakeWritten
from graftlm.lang.stream import Stream
from graftlm.lang.text_feed import TextFeed
from graftlm.lang.thoughts import REASONING_SUFFIX
from graftlm.lang.variables import Cell, Promise, Scope, Value, Variables, result_of

__all__ = ["ProgramState", "ProgramStateGroup"]

#: What a join does beside gathering variables, under SGLang's names.
_JOIN_MODES: Final = ("gather_variable", "concate_and_append")

_CANCELLED = "this program's run was cancelled"


class ProgramState:
    """A growing text with variables.

    Writing (`s += ...`, roles, forks) never waits; reading (`s[name]`, `s.text()`) waits for what it reads and raises
    ProgramError, with the line that asked for it, when that failed. A state that nobody holds any more is cancelled.
    """

    def __init__(
        self, interpreter: Stream, variables: Variables | None = None, parent: "ProgramState | None" = None
    ) -> None:
        self._interpreter = interpreter
        self._variables = variables or Variables()
        self._parent = parent  # a state goes on from its parent's, which therefore must not be cancelled before
        self._returned: Any = None
        self._finalizer = weakref.finalize(self, interpreter.fail, ProgramCancelledError(_CANCELLED))
        self._finalizer.atexit = False

    @classmethod
    def begin(cls, context: RunContext) -> Self:
        """Return an empty state."""
        return cls(Interpreter(context), Variables(is_open=True))

    def parts(self) -> tuple[Stream, Variables]:
        """Return what it writes to, and its variables: for what writes to it in a program's place."""
        return self._interpreter, self._variables

    # -- writing -------------------------------------------------------------------------------------------------------

    def __iadd__(self, other: Expr | str) -> Self:
        self._submit(as_expr(other), call_site())
        return self

    def _submit(self, expr: Expr, site: CallSite) -> None:
        if isinstance(expr, ex.Sequence):
            for part in expr.parts:
                self._submit(part, site)
            return
        cell = None
        if isinstance(expr, ex.Gen | ex.Select) and expr.name is not None:
            cell = Cell(thoughts=self._thoughts_of(expr))
            self._variables[expr.name] = cell
        self._interpreter.submit(expr, site, cell)

    def _thoughts_of(self, expr: Expr) -> Cell | None:
        """Return the variable of a gen's reasoning; None where that is not kept apart."""
        if not isinstance(expr, ex.Gen) or expr.reasoning is None:
            return None
        cell = Cell()
        self._variables[f"{expr.name}{REASONING_SUFFIX}"] = cell
        return cell

    def __setitem__(self, name: str, value: Any) -> None:
        cell = Cell()
        cell.fill(Value(value))
        self._variables[name] = cell

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable; the text stays as it is."""
        self[name] = value

    def system(self, expr: Expr | str | None = None) -> Any:
        """Append a system message, or open one: `with s.system(): ...`."""
        return self._message("system", expr)

    def user(self, expr: Expr | str | None = None) -> Any:
        """Append a user message, or open one: `with s.user(): ...`."""
        return self._message("user", expr)

    def assistant(self, expr: Expr | str | None = None) -> Any:
        """Append an assistant message, or open one: `with s.assistant(): ...`."""
        return self._message("assistant", expr)

    def _message(self, role: str, expr: Expr | str | None) -> Any:
        if expr is None:
            return self._between(ex.RoleBegin(role), ex.RoleEnd(role))
        self._submit(ex.RoleBegin(role) + as_expr(expr) + ex.RoleEnd(role), call_site())
        return None

    def var_scope(self, name: str) -> Any:
        """Keep the text of a `with` block as a variable."""
        return self._scope(name)

    @contextmanager
    def _scope(self, name: str) -> Iterator[None]:
        site = call_site()
        scope = Scope(name, site)
        cell = Cell(scope=scope)
        self._variables[name] = cell
        self._interpreter.submit(ex.ScopeBegin(name), site, cell)
        try:
            yield
        finally:  # an error that the program catches leaves it closed
            scope.is_open = False
            self._submit(ex.ScopeEnd(name), call_site())

    @contextmanager
    def _between(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._submit(begin, call_site())
        try:
            yield
        finally:  # an error that the program catches leaves no message or scope open
            self._submit(end, call_site())

    def fork(self, size: int = 1) -> "ProgramStateGroup":
        """Return `size` states that go on from here, side by side.

        The text so far is put into the backend's cache once, before any of them asks for more.
        """
        children = self._interpreter.fork(_number_of_forks(size), call_site())
        states = [ProgramState(child, Variables(self._variables.copy()), self) for child in children]
        return ProgramStateGroup(states, self)

    @contextmanager
    def copy(self) -> Iterator["ProgramState"]:
        """Go on from here in a `with` block, and afterwards as if it had not been, but for its variables."""
        group = self.fork(1)
        yield group[0]
        group.join()

    # -- reading -------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Return a variable; waits for it.

        Raises:
            KeyError: the program has not asked for such a variable.
            ProgramError: what should have made it failed, or the program's function before it came to it.
            RequestError: it is the text of a `var_scope` that the reading line is in.
        """
        return self._value(name).value

    def get_var(self, name: str) -> Any:
        """Return a variable; as `s[name]`."""
        return self[name]

    def get_meta_info(self, name: str) -> Any:
        """Return what the backend said of a variable: its tokens, why it ended; a list when `n` were generated."""
        return self._value(name).meta_info

    def _value(self, name: str) -> Value:
        cell = self._variables[name]
        cell.check_readable()
        value: Value = result_of(cell.future)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def names(self) -> set[str]:
        """Return the names of the variables as of now."""
        return set(self._variables.copy())

    def text(self) -> str:
        """Return the text, with everything written so far."""
        return self._snapshot().text

    def messages(self) -> list[dict[str, str]]:
        """Return the chat as role and content, with everything written so far."""
        return [dict(message) for message in self._snapshot().messages]

    def written(self) -> Expr:
        """Return what a fork has written since it began, to be appended to another state.

        Raises:
            ProgramError: it failed, or has begun a message of a chat and not ended it, or ended one that it found.
        """
        taken: Future[Expr] = Future()
        self._interpreter.submit(TakeWritten(taken), call_site())
        expr: Expr = result_of(taken)
        return expr

    def sync(self) -> None:
        """Wait for everything written so far."""
        self._snapshot()

    def error(self) -> ProgramError | None:
        """Return what failed in this state so far, without waiting."""
        return self._interpreter.error

    @property
    def ret_value(self) -> Any:
        """What the program's function returned; waits for that, and for what a compiled program returns.

        Raises:
            ProgramError: the function, or the state, failed.
            RequestError: the function itself reads it.
        """
        self._variables.wait_until_ended()
        if (error := self._interpreter.error) is not None:
            raise error.again()
        return self._returned.result() if isinstance(self._returned, Promise) else self._returned

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Yield the text, or a variable's, in pieces as it grows; raises ProgramError where it fails.

        Of a variable with `n` completions it is the first one, with which the program goes on.
        """
        yield from self._feed(None if var_name is None else self._variables[var_name]).chunks()

    @overload
    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: Literal[False] = False
    ) -> AsyncIterator[str]: ...

    @overload
    def text_async_iter(self, var_name: str, return_meta_data: Literal[True]) -> AsyncIterator[tuple[str, Any]]: ...

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[str | tuple[str, Any]]:
        """Yield as `text_iter`, without blocking the event loop.

        Args:
            return_meta_data: yield pairs of a piece of the variable's text and what the backend says of it by then. The
                last pair has what `get_meta_info` returns; its piece is empty where that comes behind the text.

        Raises:
            RequestError: `return_meta_data` without a variable: a whole text has no meta information.
        """
        if return_meta_data and var_name is None:
            raise RequestError("text_async_iter(return_meta_data=True) needs the name of a variable: var_name=...")
        cell = None if var_name is None else await self._variables.wait_for(var_name)
        feed = self._feed(cell)
        async for chunk in feed.achunks_with_meta() if return_meta_data else feed.achunks():
            yield chunk

    def _feed(self, cell: Cell | None) -> TextFeed:
        """Return the text of a variable, or of the state, to follow; raises RequestError in its own `var_scope`."""
        if cell is None:
            return self._interpreter.feed
        cell.check_readable()
        return cell.feed

    def _snapshot(self) -> Snapshot:
        taken: Future[Snapshot] = Future()
        self._interpreter.submit(Take(taken))
        snapshot: Snapshot = result_of(taken)
        return snapshot

    # -- the run -------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End this state and its forks; their requests are aborted. Reads raise ProgramCancelledError."""
        self._interpreter.fail(ProgramCancelledError(_CANCELLED))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[None]":
        """Run a program's function on this state, in this thread.

        Returns: done when everything that it wrote has run; fails with the ProgramError of this state.

        Raises:
            BaseException: the function's own; the state is then cancelled.
        """
        self._variables.begin()
        try:
            self._returned = function(self, *args, **kwargs)
        except BaseException as error:
            failed = function_error(error, function)
            self._interpreter.fail(failed)
            self._variables.end(failed)
            raise
        self._variables.end()
        ended: Future[None] = Future()
        self._interpreter.submit(End(ended))
        return ended

    def run_quietly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[None]":
        """Run as `run`, leaving the function's own error to those who read the state."""
        try:
            return self.run(function, *args, **kwargs)
        except BaseException as error:  # a SystemExit too: it ends this run, and not those beside it
            ended: Future[None] = Future()
            ended.set_exception(function_error(error, function))
            return ended


class ProgramStateGroup(Sequence[ProgramState]):
    """The forks of a state.

    `group += ...` writes to each of them: one expression for all, a list with one for each, or a function of the index.
    """

    def __init__(self, states: Sequence[ProgramState], parent: ProgramState) -> None:
        self._states = list(states)
        self._parent = parent

    def __getitem__(self, index: Any) -> Any:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """Take back the state that `group[i] += ...` has written to.

        Raises:
            RequestError: it is another one.
        """
        if self._states[index] is not state:
            raise RequestError("a fork cannot be replaced; write to it by `forks[i] += ...`")

    def __len__(self) -> int:
        return len(self._states)

    def __iadd__(self, other: Expr | str | Sequence[Expr | str] | Callable[[int], Expr | str]) -> Self:
        for i, (state, part) in enumerate(zip(self._states, self._part_of_each(other), strict=True)):
            state += part
            self._states[i] = state
        return self

    def _part_of_each(self, other: Any) -> Sequence[Expr | str]:
        if isinstance(other, Expr | str):
            return [other] * len(self)
        if callable(other):
            return [other(i) for i in range(len(self))]
        parts = list(other)
        if len(parts) != len(self):
            raise RequestError(f"{len(parts)} expressions are given for {len(self)} forks; give one each")
        return parts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.join()
            return
        for state in self._states:  # nobody will read them, and the error is what matters
            state.cancel()

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all, and give the parent each variable that is new in them, as the list of their values.

        The list has a place for each fork, in order, with None for those that did not set the variable.

        Args:
            mode: "gather_variable" leaves it at that. "concate_and_append" appends to the parent, besides, what each of
                them has written since the fork, in their order: its text, and the messages of the chat that it holds.

        Raises:
            ProgramError: one of them failed, or has begun a message of a chat and not ended it, or ended the parent's.
            RequestError: another mode.
        """
        if mode not in _JOIN_MODES:
            raise RequestError(f"join knows the modes {' and '.join(map(repr, _JOIN_MODES))}, got {mode!r}")
        for state in self._states:
            state.sync()
        self._gather()
        if mode == "concate_and_append":
            for state in self._states:
                self._parent += state.written()

    def _gather(self) -> None:
        known = self._parent.names()
        new = {name for state in self._states for name in state.names()} - known
        for name in sorted(new):
            self._parent[name] = [state[name] if name in state else None for state in self._states]  # noqa: SIM401 - a state has no get


def _number_of_forks(size: int) -> int:
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if number < 1:
        raise RequestError(f"fork needs the number of states, at least 1, got {size!r}")
    return number
