"""Caches the text that is common to the beginnings of all runs of a program, before the runs start."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from graftlm.errors import ProgramError
from graftlm.lang.backend import Backend
from graftlm.lang.event_loop import shared_loop, wait_in_shared_loop
from graftlm.lang.expressions import Expr, RoleBegin, RoleEnd, Text, as_expr
from graftlm.lang.graph import Graph
from graftlm.lang.interpreter import Interpreter, RunContext
from graftlm.lang.nodes import ROOT, Constant, Insert, Node
from graftlm.lang.replay import Start
from graftlm.lang.sampling import Sampling
from graftlm.lang.steps import Action, Later, Snapshot, Take
from graftlm.lang.template import Argument, Source
from graftlm.lang.variables import result_of

__all__ = ["cache_ahead", "cache_now", "shared_arguments"]

#: Types of arguments for which equal values give equal texts.
_PLAIN: Final = (str, int, float, bool, type(None))


def cache_ahead(graph: Graph, backend: Backend, arguments: Mapping[str, Any]) -> Start:
    """Ask the backend to cache a graph's first text, if it is long enough.

    Args:
        arguments: arguments that are equal in all runs.

    Returns: the point from which the runs continue. If the text cannot be rendered, this is the beginning of the graph;
        each run then raises the error and names its line.
    """
    leading = _leading(graph, arguments)
    try:
        return Start(len(leading), _snapshot_after(leading, backend, arguments, is_hint=True))
    except ProgramError:
        return Start()


def cache_now(graph: Graph, backend: Backend) -> None:
    """Ask the backend to cache a graph's first text, of any length.

    Raises:
        GraftlmError: the text cannot be rendered, or the backend refuses or fails.
    """
    text = _snapshot_after(_leading(graph, {}), backend, {}, is_hint=False).text
    if text:
        wait_in_shared_loop(_cache(backend, text))


async def _cache(backend: Backend, text: str) -> None:
    await backend.cache_prefix(text)


def shared_arguments(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments that are plain values and equal in all runs."""
    first, *others = runs
    return {
        name: value
        for name, value in first.items()
        if isinstance(value, _PLAIN)
        and all(name in run and type(run[name]) is type(value) and run[name] == value for run in others)
    }


def _snapshot_after(
    nodes: Sequence[Node], backend: Backend, arguments: Mapping[str, Any], *, is_hint: bool
) -> Snapshot:
    """Run nodes on a new state and return the state after them; with `is_hint`, the backend caches a long text."""
    interpreter = Interpreter(RunContext(backend, Sampling(), False, shared_loop()))
    taken: Future[Snapshot] = Future()
    for node in nodes:
        interpreter.submit(_step(node, arguments), node.site)
    interpreter.submit(Take(taken, shared=is_hint))
    snapshot: Snapshot = result_of(taken)
    return snapshot


def _leading(graph: Graph, arguments: Mapping[str, Any]) -> list[Node]:
    """Return the root state's nodes before the first one that needs a model or an argument not in `arguments`."""
    leading = []
    for node in graph.branches[ROOT].nodes:
        match node.action:
            case Constant() | RoleBegin() | RoleEnd():
                leading.append(node)
            case Insert(slot) if isinstance(slot.source, Argument) and slot.source.name in arguments:
                leading.append(node)
            case _:
                break
    return leading


def _step(node: Node, arguments: Mapping[str, Any]) -> Action:
    def value_of(source: Source) -> Any:
        assert isinstance(source, Argument)  # leading nodes have no other sources
        return arguments[source.name]

    match node.action:
        case Constant(text):
            return Text(text)
        case Insert(slot):

            async def rendered() -> Expr:
                return as_expr(slot.value(value_of))

            return Later(rendered)  # Later turns its errors into ProgramErrors
        case RoleBegin() | RoleEnd() as role:
            return role
        case action:
            raise AssertionError(f"{action} cannot be a leading node")
