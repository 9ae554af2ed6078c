"""An LM program: a function of a state, to be run once or many times."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import update_wrapper
from typing import Any, overload

from graftlm.errors import RequestError
from graftlm.lang.backend import Backend
from graftlm.lang.bound import BoundFunction
from graftlm.lang.compiler import CompiledProgram
from graftlm.lang.default_backend import default_backend, resolve
from graftlm.lang.graph import Graph
from graftlm.lang.prefix import cache_ahead
from graftlm.lang.runner import Runner
from graftlm.lang.state import ProgramState
from graftlm.lang.tracer import trace, trace_prefix

__all__ = ["Program", "function"]

#: Names of `run` for itself, by which a program's own argument could not be given.
_RUN_NAMES = frozenset({"backend", "stream"})


class Program:
    """A function whose first argument is the state that it writes to and reads from; `@function` makes one.

    Called within another program, with that program's state, it is an ordinary function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        prefix: Graph | None = None,
        cached_in: Backend | None = None,
        *,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        """Wrap a function.

        Args:
            prefix: the graph of what it begins with, as far as that is known; cached before batches.
            cached_in: a backend that has it already.
            num_api_spec_tokens: as of `@function`.

        Raises:
            RequestError: it takes no argument for the state or one named like an option of `run`, would not run when it
                is called, or there are no tokens to ask for ahead.
        """
        _check_num_api_spec_tokens(num_api_spec_tokens)
        _check_runs_when_called(function)
        self._num_api_spec_tokens = num_api_spec_tokens
        parameters = list(inspect.signature(function).parameters)
        if not parameters:
            raise RequestError(f"{function.__qualname__}() needs a first argument for its state, by custom named s")
        if taken := _RUN_NAMES & set(parameters[1:]):
            raise RequestError(
                f"{function.__qualname__}() has an argument {min(taken)}, which is an option of run(...) itself; "
                "rename it"
            )
        self._function = function
        self._runner = Runner(function, num_api_spec_tokens=num_api_spec_tokens)
        self._prefix = prefix
        self._cached_in = cached_in
        update_wrapper(self, function, updated=())  # its name and docstring; what it holds itself is its own

    def __call__(self, s: ProgramState, *args: Any, **kwargs: Any) -> Any:
        """Go on writing to another program's state; returns what the function returns."""
        return self._function(s, *args, **kwargs)

    def run(self, *args: Any, backend: Any = None, stream: bool = False, **kwargs: Any) -> ProgramState:
        """Run it once.

        Args:
            args, kwargs: the function's, and sampling parameters of `gen` (`max_tokens` or `max_new_tokens`,
                `temperature`, `stop`, ...) for each `gen` that leaves them open.
            backend: an Engine, a RuntimeEndpoint or a Backend; the default one when left out.
            stream: return at once, and let texts grow token by token; the function then runs in a thread of its own.

        Returns: the state; without `stream`, everything in it is done.

        Raises:
            ProgramError: an expression failed; without `stream`.
            Exception: the function's own; without `stream`.
        """
        return self._runner.run(*args, backend=resolve(backend), stream=stream, **kwargs)

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Any],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **sampling: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run it once for each set of arguments.

        Args:
            batch_kwargs: keyword arguments of each run; a plain value stands for the only argument.
            num_threads: threads for the function's own Python. A program that reads holds one while it waits; one
                that only writes does not.
            progress_bar: show one on standard error.
            generator_style: yield states in order as they are done, and start runs only a little ahead.
            sampling: as of `run`.

        Returns: one state each, in order. One that failed raises when it is read; the others are not affected.

        Raises:
            RequestError: `batch_kwargs` has no entry for each run.
        """
        runs, backend = self._runner.keywords(batch_kwargs), resolve(backend)
        if self._prefix is not None and backend is not self._cached_in and len(runs) > 1:
            cache_ahead(self._prefix, backend, {})
        return self._runner.run_batch(
            runs,
            backend=backend,
            num_threads=num_threads,
            progress_bar=progress_bar,
            generator_style=generator_style,
            **sampling,
        )

    def bind(self, **constants: Any) -> "Program":
        """Return the program with some of its arguments given.

        What it begins with, up to the first text that depends on another argument or on a model, is put into the
        default backend's cache at once when there is one, and into that of another backend before a batch there starts.
        To find it, the function runs once, with placeholders instead of the rest.

        Raises:
            RequestError: a constant is no argument of the program.
        """
        bound = BoundFunction(self._function, constants)
        prefix = trace_prefix(bound, {})
        backend = default_backend()
        if backend is not None:
            cache_ahead(prefix, backend, {})
        return Program(bound, prefix, backend, num_api_spec_tokens=self._num_api_spec_tokens)

    def trace(self, **constants: Any) -> Graph:
        """Return what the program says as a graph, without running a model. The function runs a few times for it.

        Args:
            constants: arguments; the others stay free, and placeholders stand for them.

        Raises:
            TraceError: the program looks at a value that is only there when it runs: an argument that is free, or what
                a model writes. Says the line.
            RequestError: a constant is no argument of the program.
        """
        return trace(self._function, constants)

    def compile(self, *, outputs: str | Collection[str] | None = None, **constants: Any) -> CompiledProgram:
        """Return the program as a graph that runs by itself.

        Args:
            outputs: names of variables, or one name, that are wanted beside the returned value; what none of these
                depends on is left out, and the text ends there. None keeps the whole text and all variables.
            constants: arguments; the others are given to `run`.

        Raises:
            TraceError: as `trace`.
            RequestError: a constant is no argument of the program, or an output no variable.
        """
        return CompiledProgram(self._function, constants, outputs, num_api_spec_tokens=self._num_api_spec_tokens)


def _check_num_api_spec_tokens(number: int | None) -> None:
    if number is None:
        return
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise RequestError(f"num_api_spec_tokens must be at least 1, or None, got {number!r}")


def _check_runs_when_called(function: Callable[..., Any]) -> None:
    kinds = {
        "async def": inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function),
        "a generator, with yield": inspect.isgeneratorfunction(function),
    }
    for kind, is_one in kinds.items():
        if is_one:
            raise RequestError(
                f"{function.__qualname__}() is {kind}, of which a call runs nothing; make the program of an ordinary "
                "function: writing never waits, and run(..., stream=True) returns at once"
            )


@overload
def function(func: Callable[..., Any], *, num_api_spec_tokens: int | None = None) -> Program: ...


@overload
def function(
    func: None = None, *, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Program]: ...


def function(
    func: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make an LM program of a function whose first argument is its state: `@function`, or `@function(...)`.

    Args:
        num_api_spec_tokens: tokens that an `OpenAI` backend may ask for at a time, in order to answer several `gen`s
            by one call. Other backends, whose prefixes are cached, ask for each `gen` alone.
    """
    if func is None:
        return lambda func: Program(func, num_api_spec_tokens=num_api_spec_tokens)
    return Program(func, num_api_spec_tokens=num_api_spec_tokens)
