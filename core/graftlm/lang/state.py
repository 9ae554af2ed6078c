"""The state of a program's run, which the program writes to and reads from; and groups of forked states."""

import operator
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Final, Literal, Self, overload

from graftlm.errors import ProgramCancelledError, ProgramError, RequestError
from graftlm.lang import expressions as ex
from graftlm.lang.call_site import CallSite, call_site, function_error
from graftlm.lang.expressions import Expr, as_expr
from graftlm.lang.interpreter import Interpreter, RunContext
from graftlm.lang.new_logprobs import NewLogprobs
from graftlm.lang.reasoning import REASONING_SUFFIX
from graftlm.lang.steps import End, Snapshot, Take, TakeWritten
from graftlm.lang.stream import Stream
from graftlm.lang.text_feed import TextFeed
from graftlm.lang.variables import Cell, Promise, Scope, Value, Variables, result_of

__all__ = ["ProgramState", "ProgramStateGroup"]

#: The modes of `join`, under SGLang's names.
_JOIN_MODES: Final = ("gather_variable", "concate_and_append")

_CANCELLED = "this program's run was cancelled"


class ProgramState:
    """A growing text with variables.

    Writing (`s += ...`, roles, forks) never waits. Reading (`s[name]`, `s.text()`) waits for the value. If its
    expression failed, reading raises ProgramError with the program's line that appended the expression. A state without
    references is cancelled.
    """

    def __init__(
        self, interpreter: Stream, variables: Variables | None = None, parent: "ProgramState | None" = None
    ) -> None:
        self._interpreter = interpreter
        self._variables = variables or Variables()
        self._parent = parent  # the parent, whose text this state needs, is not cancelled while referenced
        self._returned: Any = None
        self._finalizer = weakref.finalize(self, interpreter.fail, ProgramCancelledError(_CANCELLED))
        self._finalizer.atexit = False

    @classmethod
    def begin(cls, context: RunContext) -> Self:
        """Return an empty state."""
        return cls(Interpreter(context), Variables(is_open=True))

    def parts(self) -> tuple[Stream, Variables]:
        """Return the state's interpreter and variables, for code of the language that writes to the state directly."""
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
            cell = Cell(reasoning=self._reasoning_cell(expr))
            self._variables[expr.name] = cell
        self._interpreter.submit(expr, site, cell)

    def _reasoning_cell(self, expr: Expr) -> Cell | None:
        """Return a variable for a gen's reasoning; None if the reasoning is not separated."""
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
        """Set a variable; the text does not change."""
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
        """Store the text of a `with` block as a variable."""
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
        finally:  # the scope also ends if the program catches an error of its block
            scope.is_open = False
            self._submit(ex.ScopeEnd(name), call_site())

    @contextmanager
    def _between(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._submit(begin, call_site())
        try:
            yield
        finally:  # the message also ends if the program catches an error of its block
            self._submit(end, call_site())

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> "ProgramStateGroup":
        """Return `size` states that continue from here and run in parallel.

        The backend caches the text so far once, before the first fork sends a request.

        Args:
            position_ids_offset: accepted for SGLang's programs; has no effect, as in SGLang's backends.
        """
        children = self._interpreter.fork(_number_of_forks(size), call_site())
        states = [ProgramState(child, Variables(self._variables.copy()), self) for child in children]
        return ProgramStateGroup(states, self)

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator["ProgramState"]:
        """Yield a copy of this state for a `with` block. Afterwards this state has the block's variables, not its text.

        Args:
            position_ids_offset: see `fork`.
        """
        group = self.fork(1)
        yield group[0]
        group.join()

    # -- reading -------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Return a variable; waits for it.

        Raises:
            KeyError: the program has no such variable.
            ProgramError: its expression failed, or the program's function failed before it created the variable.
            RequestError: the variable is the text of a `var_scope`, and the calling code is inside that block.
        """
        return self._value(name).value

    def get_var(self, name: str) -> Any:
        """Return a variable; the same as `s[name]`."""
        return self[name]

    def get_meta_info(self, name: str) -> Any:
        """Return a variable's meta information, such as its finish reason; a list if the variable has `n` texts."""
        return self._value(name).meta_info

    def _value(self, name: str) -> Value:
        cell = self._variables[name]
        cell.check_readable()
        value: Value = result_of(cell.future)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def names(self) -> set[str]:
        """Return the names of the variables so far."""
        return set(self._variables.copy())

    def text(self) -> str:
        """Wait for everything appended so far; return the text."""
        return self._snapshot().text

    def __str__(self) -> str:
        """Return the text; see `text`."""
        return str(self.text())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with the variables {', '.join(sorted(self.names())) or 'none'}>"

    def messages(self) -> list[dict[str, str]]:
        """Wait for everything appended so far; return the chat's messages, each with role and content."""
        return [dict(message) for message in self._snapshot().messages]

    def written(self) -> Expr:
        """Return everything that a fork has appended since it began, as an expression for another state.

        Raises:
            ProgramError: the fork failed, began a chat message and left it open, or ended its parent's message.
        """
        taken: Future[Expr] = Future()
        self._interpreter.submit(TakeWritten(taken), call_site())
        expr: Expr = result_of(taken)
        return expr

    def sync(self) -> None:
        """Wait for everything appended so far."""
        self._snapshot()

    def error(self) -> ProgramError | None:
        """Wait for everything appended so far; return the error of this state, or None."""
        with suppress(ProgramError):  # the error is returned below
            self.sync()
        return self._interpreter.error

    @property
    def ret_value(self) -> Any:
        """The function's return value; reading it waits until the function has returned.

        The return value of a compiled program may contain generated text; reading it also waits for that text.

        Raises:
            ProgramError: the function, or an expression of the state, failed.
            RequestError: the program's own function reads its return value.
        """
        self._variables.wait_until_ended()
        if (error := self._interpreter.error) is not None:
            raise error.again()
        return self._returned.result() if isinstance(self._returned, Promise) else self._returned

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Yield the state's text, or a variable's text, in pieces as it grows.

        If the variable has `n` completions, the text is the first one.

        Raises:
            ProgramError: the state or the variable failed; raised after the text so far.
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
        """Yield like `text_iter`, without blocking the event loop.

        Args:
            return_meta_data: yield pairs of a piece of the variable's text and the meta information at that point.
                Counts in the meta information refer to the whole text so far. Log-probabilities are only those of
                generated tokens that no earlier pair contained. No piece is empty, so `get_meta_info` may contain more
                than the last pair.

        Raises:
            RequestError: `return_meta_data` is set without a variable; the text of a state has no meta information.
        """
        if return_meta_data and var_name is None:
            raise RequestError("text_async_iter(return_meta_data=True) needs the name of a variable: var_name=...")
        cell = None if var_name is None else await self._variables.wait_for(var_name)
        feed = self._feed(cell)
        if not return_meta_data:
            async with aclosing(feed.achunks()) as pieces:
                async for piece in pieces:
                    yield piece
            return
        new = NewLogprobs()
        async with aclosing(feed.achunks_with_meta()) as pairs:
            async for piece, meta_info in pairs:
                yield piece, new.of(meta_info)

    def _feed(self, cell: Cell | None) -> TextFeed:
        """Return the feed of a variable or of the state; raises RequestError inside the variable's `var_scope`."""
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

        Returns: a future that is done when all expressions have run. If the state fails, the future has its
        ProgramError.

        Raises:
            BaseException: the function raised it; the state then fails.
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
        """Run like `run`, but do not raise the function's error; later reads of the state raise it."""
        try:
            return self.run(function, *args, **kwargs)
        except BaseException as error:  # includes SystemExit, which ends this run, but no other run of the batch
            ended: Future[None] = Future()
            ended.set_exception(function_error(error, function))
            return ended


class ProgramStateGroup(Sequence[ProgramState]):
    """The forks of a state.

    `group += ...` appends to each fork. The value is one expression for all forks, a list with one expression per fork,
    or a function of the fork's index.
    """

    def __init__(self, states: Sequence[ProgramState], parent: ProgramState) -> None:
        self._states = list(states)
        self._parent = parent

    def __getitem__(self, index: Any) -> Any:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """Accept the assignment that is part of `group[i] += ...`.

        Raises:
            RequestError: `state` is another state.
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
            raise RequestError(f"got {len(parts)} expressions for {len(self)} forks; give one for each fork")
        return parts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.join()
            return
        for state in self._states:  # the block raised an error, so the forks' results are not needed
            state.cancel()

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all forks, and collect their new variables in the parent.

        In the parent, each new variable is a list with one entry per fork, in order. The entry is None if the fork did
        not set the variable.

        Args:
            mode: "gather_variable" sets only the variables. "concate_and_append" also appends to the parent, in order,
                the text and the chat messages that each fork has appended since it began.

        Raises:
            ProgramError: a fork failed, began a chat message and left it open, or ended its parent's message.
            RequestError: the mode is unknown.
        """
        if mode not in _JOIN_MODES:
            raise RequestError(f"the mode of join must be {' or '.join(map(repr, _JOIN_MODES))}, got {mode!r}")
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
