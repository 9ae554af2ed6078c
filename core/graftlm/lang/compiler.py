"""A compiled program: its optimised graph, and its runs."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from graftlm.lang.bound import free_signature
from graftlm.lang.default_backend import resolve
from graftlm.lang.graph import Graph
from graftlm.lang.nodes import Fork
from graftlm.lang.optimizer import drop_dead, fold_constants, merge_prefixes, share_requests
from graftlm.lang.prefix import cache_ahead, shared_arguments
from graftlm.lang.replay import Replay, Start
from graftlm.lang.runner import Runner
from graftlm.lang.state import ProgramState
from graftlm.lang.tracer import trace

__all__ = ["CompiledProgram"]


class CompiledProgram:
    """A program as an optimised graph. At temperature 0 it generates the same text as the program, with fewer requests.

    The function itself does not run. All expressions are submitted immediately. An expression that depends on generated
    text waits for it without a thread. Independent expressions run in parallel.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        constants: Mapping[str, Any],
        outputs: str | Collection[str] | None = None,
        *,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        """Trace a function and optimise its graph; `Program.compile` and `@function` describe the arguments."""
        self._num_api_spec_tokens = num_api_spec_tokens
        names = (outputs,) if isinstance(outputs, str) else outputs
        reachable = drop_dead(trace(function, constants), names)
        live = drop_dead(fold_constants(reachable), names)
        self._unshared = merge_prefixes(live)
        self._graph = share_requests(self._unshared, speculates=num_api_spec_tokens is not None)
        self._constants = tuple(constants)
        self._signature = free_signature(function, constants)
        parameters = self._signature.parameters.values()
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @property
    def graph(self) -> Graph:
        """The optimised graph. In runs with `stream=True` or `n`, the states do not share requests."""
        return self._graph

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program once; see `run`."""
        return self.run(*args, **kwargs)

    def run(
        self, *args: Any, backend: Any = None, stream: bool = False, use_thread: bool = True, **kwargs: Any
    ) -> ProgramState:
        """Run the program once; see `Program.run`."""
        return self._runner(Start()).run(*args, backend=resolve(backend), stream=stream, **kwargs)

    def run_batch(
        self, batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Any], *, backend: Any = None, **options: Any
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once for each set of arguments; see `Program.run_batch`.

        If the runs fork, their common prefix is cached before the first run starts. It consists of constants, and of
        arguments that are equal in all runs. If it were not cached, each run would send a request to cache it before
        its fork. Runs without forks do not need such a request: if they arrive together, the first run computes the
        prefix for all runs.
        """
        runner, backend = self._runner(Start()), resolve(backend)
        runs = runner.keywords(batch_kwargs)
        if len(runs) > 1 and self._caches():
            shared = shared_arguments([self._defaults | dict(run) for run in runs])
            runner = self._runner(cache_ahead(self._graph, backend, shared))
        return runner.run_batch(runs, backend=backend, **options)

    def _caches(self) -> bool:
        forks = [node.action for node in self._graph.nodes() if isinstance(node.action, Fork)]
        return any(fork.is_hint and len(fork.branches) > 1 for fork in forks)

    def _runner(self, start: Start) -> Runner:
        replay = Replay(self._unshared, self._graph, self._signature, start, self._constants)
        return Runner(replay, num_api_spec_tokens=self._num_api_spec_tokens)
