"""Runs a program's function on new states, once or many times."""

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from graftlm.errors import RequestError
from graftlm.lang.backend import Backend
from graftlm.lang.batch import as_runs, run_batch
from graftlm.lang.event_loop import shared_loop
from graftlm.lang.interpreter import RunContext
from graftlm.lang.sampling import Sampling, make_sampling
from graftlm.lang.state import ProgramState

__all__ = ["Runner"]

logger = logging.getLogger(__name__)

#: Arguments of `run` that are sampling parameters, unless the program's function has an argument of that name.
_SAMPLING_NAMES: Final = frozenset(Sampling.__dataclass_fields__) | {"max_new_tokens"}


class Runner:
    """Runs a function, each time with a new state, in the calling thread or in other threads."""

    def __init__(self, function: Callable[..., Any], *, num_api_spec_tokens: int | None = None) -> None:
        """Create a runner for a function of a state and arguments; see `@function` for `num_api_spec_tokens`."""
        self._function = function
        self._num_api_spec_tokens = num_api_spec_tokens
        self._argument_names = list(inspect.signature(function).parameters)[1:]
        self._sampling_names = _SAMPLING_NAMES.difference(self._argument_names)

    def run(self, *args: Any, backend: Backend, stream: bool, **kwargs: Any) -> ProgramState:
        """Run the function once; see `Program.run`."""
        state, arguments = self._begin(kwargs, backend, stream)
        if stream:
            worker = _Worker(state, self._function, args, arguments)
            threading.Thread(target=worker, name=f"graftlm-{self._function.__name__}", daemon=True).start()
            return state
        try:
            state.run(self._function, *args, **arguments).exception()  # waits; reads of the state raise the error
        except BaseException:
            state.cancel()  # also after KeyboardInterrupt: the remaining expressions are not needed
            raise
        if (error := state.error()) is not None:
            logger.warning("%s() ended with an error in its state: %s", self._function.__name__, error)
        return state

    def run_batch(
        self,
        runs: Sequence[Mapping[str, Any]],
        *,
        backend: Backend,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **sampling: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the function once for each entry of `runs`, which `keywords` has returned; see `Program.run_batch`."""

        def start(arguments: Mapping[str, Any]) -> tuple[ProgramState, Callable[[], Any]]:
            state, own = self._begin(dict(arguments) | sampling, backend, False)
            return state, lambda: state.run_quietly(self._function, **own)

        states = run_batch(start, runs, num_threads, progress_bar)
        return states if generator_style else list(states)

    def keywords(self, batch_kwargs: Any) -> list[Mapping[str, Any]]:
        """Return the keyword arguments of each run of a batch.

        An entry is a mapping, a list or tuple of positional arguments, or the plain value of the only argument.

        Raises:
            RequestError: the batch is not a list of entries, or an entry does not match the function's arguments.
        """
        return [self._keywords_of(arguments) for arguments in as_runs(batch_kwargs)]

    def _keywords_of(self, arguments: Any) -> Mapping[str, Any]:
        if isinstance(arguments, Mapping):
            return arguments
        if isinstance(arguments, list | tuple):
            return self._named(arguments)
        if len(self._argument_names) != 1:
            raise RequestError(
                f"run_batch takes a mapping or a list of arguments for each run, since {self._function.__name__}() has "
                f"{len(self._argument_names)} arguments; got {type(arguments).__name__}"
            )
        return {self._argument_names[0]: arguments}

    def _named(self, values: Sequence[Any]) -> Mapping[str, Any]:
        """Return positional arguments as keyword arguments."""
        try:
            bound = inspect.signature(self._function).bind(None, *values)
        except TypeError as error:
            raise RequestError(
                f"run_batch: {len(values)} positional arguments do not match {self._function.__name__}(), whose "
                f"arguments are: {', '.join(self._argument_names) or 'none'} ({error})"
            ) from None
        if len(bound.arguments) != 1 + len(values):
            raise RequestError(
                f"run_batch takes a mapping for each run, since {self._function.__name__}() has an argument with *"
            )
        return dict(zip(self._argument_names, values, strict=False))

    def _begin(self, kwargs: dict[str, Any], backend: Backend, stream: bool) -> tuple[ProgramState, dict[str, Any]]:
        """Return a new state, and the entries of `kwargs` that are arguments of the function."""
        sampling = {key: value for key, value in kwargs.items() if key in self._sampling_names}
        arguments = {key: value for key, value in kwargs.items() if key not in sampling}
        if "max_new_tokens" in sampling:
            sampling["max_tokens"] = sampling.pop("max_new_tokens")
        context = RunContext(backend, make_sampling(sampling), stream, shared_loop(), self._num_api_spec_tokens)
        return ProgramState.begin(context), arguments


class _Worker:
    """Runs a program's function in a thread, and drops its reference to the state when the function has returned."""

    def __init__(
        self, state: ProgramState, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._call: tuple[Any, ...] | None = (state, function, args, kwargs)

    def __call__(self) -> None:
        assert self._call is not None  # a thread runs once
        (state, function, args, kwargs), self._call = self._call, None
        state.run_quietly(function, *args, **kwargs)
