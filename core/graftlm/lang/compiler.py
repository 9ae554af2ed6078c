"""A compiled program: its graph after all passes, and the runs of it."""

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
    """A program as a graph. It runs as the program does, with the same text at temperature 0, for fewer requests.

    The function itself does not run any more: every expression is handed over at once, those that read others' answers
    wait for them without a thread, and those that do not go side by side.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        constants: Mapping[str, Any],
        outputs: str | Collection[str] | None = None,
        *,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        """Trace a function and work on its graph; see `Program.compile`, and `@function` for the last argument."""
        self._num_api_spec_tokens = num_api_spec_tokens
        wanted = (outputs,) if isinstance(outputs, str) else outputs
        reachable = drop_dead(trace(function, constants), wanted)
        live = drop_dead(fold_constants(reachable), wanted)
        self._apart = merge_prefixes(live)
        self._graph = share_requests(self._apart, speculates=num_api_spec_tokens is not None)
        self._constants = tuple(constants)
        self._signature = free_signature(function, constants)
        parameters = self._signature.parameters.values()
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @property
    def graph(self) -> Graph:
        """What runs. With `stream=True` or `n`, each state makes requests of its own instead of sharing them."""
        return self._graph

    def run(self, *args: Any, backend: Any = None, stream: bool = False, **kwargs: Any) -> ProgramState:
        """Run it once; as `Program.run`."""
        return self._runner(Start()).run(*args, backend=resolve(backend), stream=stream, **kwargs)

    def run_batch(
        self, batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Any], *, backend: Any = None, **options: Any
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run it once for each set of arguments; as `Program.run_batch`.

        When its runs fork, what all of them begin with (constants, and arguments that are the same in all) is put into
        the backend's cache before the first of them starts, so that none has to see to it before its fork. Runs that do
        not fork need no such request: the first of those that arrive together computes it for the others.
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
        replay = Replay(self._apart, self._graph, self._signature, start, self._constants)
        return Runner(replay, num_api_spec_tokens=self._num_api_spec_tokens)
