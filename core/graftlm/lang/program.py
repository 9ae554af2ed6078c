"""An LM program: a function of a state, which can run once or many times."""

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
from graftlm.lang.prefix import cache_ahead, cache_now
from graftlm.lang.runner import Runner
from graftlm.lang.state import ProgramState
from graftlm.lang.tracer import trace, trace_prefix

__all__ = ["Program", "function"]

#: Arguments of `run` itself. A program's function must not have arguments of these names.
_RUN_NAMES = frozenset({"backend", "stream", "use_thread"})


class Program:
    """A function whose first argument is the state that it writes to and reads from; `@function` makes one.

    `program(...)` is the same as `program.run(...)`, unless the first argument is a state: then the program acts as an
    ordinary function on this state.
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
            prefix: the graph of the function's first texts, if it was traced; its text is cached before a batch runs.
            cached_in: a backend that has cached this prefix already.
            num_api_spec_tokens: see `@function`.

        Raises:
            RequestError: the function has no argument for the state, or an argument with the name of an option of
                `run`; it is a coroutine or a generator; or `num_api_spec_tokens` is less than 1.
        """
        _check_num_api_spec_tokens(num_api_spec_tokens)
        _check_runs_when_called(function)
        self._num_api_spec_tokens = num_api_spec_tokens
        parameters = list(inspect.signature(function).parameters)
        if not parameters:
            raise RequestError(
                f"{function.__qualname__}() needs a first argument for its state, which is usually named s"
            )
        if taken := _RUN_NAMES & set(parameters[1:]):
            raise RequestError(
                f"{function.__qualname__}() has an argument {min(taken)}, which is an option of run(...) itself; "
                "rename it"
            )
        self._function = function
        self._runner = Runner(function, num_api_spec_tokens=num_api_spec_tokens)
        self._prefix = prefix
        self._cached_in = cached_in
        update_wrapper(self, function, updated=())  # copies name and docstring, but not the function's __dict__

    @property
    def func(self) -> Callable[..., Any]:
        """The wrapped function; its arguments are the state and the program's arguments."""
        return self._function

    @property
    def arg_names(self) -> list[str]:
        """The names of the program's arguments, without the state and without bound ones."""
        return list(inspect.signature(self._function).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; see `run`. If the first argument is a state, call the function with this state instead.

        Returns: the state of the new run; or the function's result, if it was called with a state.
        """
        if args and isinstance(args[0], ProgramState):
            return self._function(*args, **kwargs)
        return self.run(*args, **kwargs)

    def run(
        self, *args: Any, backend: Any = None, stream: bool = False, use_thread: bool = True, **kwargs: Any
    ) -> ProgramState:
        """Run the program once.

        Args:
            args, kwargs: arguments of the function, and sampling parameters (`max_tokens` or `max_new_tokens`,
                `temperature`, `stop`, ...). A sampling parameter applies to each `gen` that does not set it itself.
            backend: an Engine, a RuntimeEndpoint or a Backend; None: the default backend.
            stream: return immediately; texts then grow token by token, and the function runs in a new thread.
            use_thread: has no effect: the expressions of a state never need a thread.

        Returns: the state. Without `stream`, all its expressions are finished. If an expression failed, `state.error()`
            returns the error, and every read of the state raises it.

        Raises:
            Exception: the function itself raised it (only without `stream`).
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
        """Run the program once for each set of arguments.

        Args:
            batch_kwargs: the arguments of each run: a mapping of keyword arguments, or a list or tuple of positional
                arguments. If the function has one argument, an entry may be the plain value of this argument, unless
                the value is itself a mapping, list or tuple.
            num_threads: number of threads that run the function. A program occupies a thread while it waits for a
                value that it reads. A program that only writes does not wait.
            progress_bar: show a progress bar on standard error.
            generator_style: return an iterator, which yields each state when it is finished. The number of runs in
                progress is limited.
            sampling: sampling parameters, as in `run`.

        Returns: the states, in the order of `batch_kwargs`. If a run failed, reads of its state raise the error; the
            other runs are not affected.

        Raises:
            RequestError: `batch_kwargs` is not a list of the arguments of each run.
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

    def cache(self, backend: Any = None) -> None:
        """Cache the program's prefix in a backend, and wait until the request is queued.

        The prefix is the program's text before the first part that depends on an argument or on a model. To find the
        prefix, the function runs once, with placeholders for its arguments.

        Args:
            backend: see `run`.

        Raises:
            GraftlmError: the backend refuses, or fails.
        """
        cache_now(self._prefix or trace_prefix(self._function, {}), resolve(backend))

    def bind(self, **constants: Any) -> "Program":
        """Return the program with constants for some of its arguments.

        The program's prefix is its text before the first part that depends on another argument or on a model. The
        default backend, if there is one, caches the prefix immediately. Any other backend caches it before it runs a
        batch. To find the prefix, the function runs once, with placeholders for the other arguments.

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
        """Return the program's expressions as a graph. No model runs; the function runs a few times.

        Args:
            constants: values of arguments. The other arguments are free: the function gets placeholders for them.

        Raises:
            TraceError: the program needs the value of a free argument or of generated text. The message names the line.
            RequestError: a constant is no argument of the program.
        """
        return trace(self._function, constants)

    def compile(self, *, outputs: str | Collection[str] | None = None, **constants: Any) -> CompiledProgram:
        """Return the program as a graph that runs without the function.

        Args:
            outputs: one or more names of variables that are needed in addition to the returned value. Parts that are
                not needed for these variables or the returned value are left out, so the text ends early. None keeps
                all variables and the whole text.
            constants: values of arguments; the other arguments are passed to `run`.

        Raises:
            TraceError: see `trace`.
            RequestError: a constant is no argument of the program, or an output is not a variable of the program.
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
                f"{function.__qualname__}() is {kind}, so a call does not run its body. Use an ordinary function: "
                "appending text never waits, and run(..., stream=True) returns at once"
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
    """Make an LM program of a function whose first argument is a state: `@function`, or `@function(...)`.

    Args:
        num_api_spec_tokens: number of tokens that an `OpenAI` backend may request in one call, so that one call can
            answer several `gen`s. Other backends cache prefixes and make one request for each `gen`.
    """
    if func is None:
        return lambda func: Program(func, num_api_spec_tokens=num_api_spec_tokens)
    return Program(func, num_api_spec_tokens=num_api_spec_tokens)
