"""Runs a graph on a program's state: all nodes are submitted to interpreters immediately, and no thread waits."""

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graftlm.errors import ProgramError
from graftlm.lang.bound import bind_free
from graftlm.lang.expressions import Expr, Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text, as_expr
from graftlm.lang.graph import Graph
from graftlm.lang.interpreter import Interpreter
from graftlm.lang.nodes import ROOT, Adopt, Choose, Constant, Fork, Insert, Node, ReadText, ReadWritten
from graftlm.lang.state import ProgramState
from graftlm.lang.steps import Action as Step
from graftlm.lang.steps import Later, Snapshot, Take, TakeWritten
from graftlm.lang.template import Argument, MetaInfo, Produced, Slot, Source, Template, fill, slots_of
from graftlm.lang.variables import Cell, Promise, Value, Variables, arrival, result_of

__all__ = ["Replay", "Start"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Start:
    """The point at which runs begin.

    It is the beginning of the graph, or the point after nodes that were run once for all runs of a batch.

    Attributes:
        num_nodes: number of leading nodes of ROOT that have already run.
        snapshot: the state after these nodes.
    """

    num_nodes: int = 0
    snapshot: Snapshot = field(default_factory=Snapshot)


class Replay:
    """A program's function that runs a graph; its arguments are a state and the free arguments."""

    def __init__(
        self,
        graph: Graph,
        shared: Graph,
        signature: inspect.Signature,
        start: Start,
        constants: Collection[str] = (),
    ) -> None:
        """Create the function.

        Args:
            graph: the graph in which each state sends its own requests; used for streams and for runs with `n`.
            shared: the graph in which states share requests for several completions; used for all other runs.
            signature: signature with the state and the free arguments.
            constants: names of the other arguments, whose values are part of the graphs.
        """
        self._graph = graph
        self._shared = shared
        self._start = start
        self._constants = constants
        self.__signature__ = signature
        self.__name__ = self.__qualname__ = graph.name

    def __call__(self, s: ProgramState, *args: Any, **kwargs: Any) -> Any:
        """Submit the graph to an empty state; return the program's return value or a Promise of it."""
        bound = bind_free(self.__name__, self.__signature__, self._constants, s, *args, **kwargs)
        bound.apply_defaults()
        interpreter, variables = s.parts()
        assert isinstance(interpreter, Interpreter)  # a trace never calls a compiled program
        context = interpreter.context
        is_shared = not context.streams and context.defaults.n in (None, 1)
        run = _Run(self._shared if is_shared else self._graph, dict(bound.arguments))
        return run.begin(interpreter, variables, self._start)


class _Run:
    """One run of a graph: its arguments, and a cell for each node that has a value."""

    def __init__(self, graph: Graph, arguments: Mapping[str, Any]) -> None:
        self._graph = graph
        self._arguments = arguments
        self._cells = {node.node_id: Cell() for node in graph.nodes() if node.produces()}

    def begin(self, interpreter: Interpreter, variables: Variables, start: Start) -> Any:
        """Submit all nodes to the interpreter and its forks; return the program's return value or a Promise of it."""
        interpreter.submit(start.snapshot)
        gathered = self._set_variables(variables)
        self._submit(self._graph.branches[ROOT].nodes[start.num_nodes :], interpreter)
        for cell, structure in gathered:
            interpreter.submit(Later(self._after(slots_of(structure), self._filling(cell, structure))), cell=cell)
        returned = self._graph.returned
        results = slots_of((dict(self._graph.variables), returned))
        interpreter.submit(Later(self._after(results, lambda: Text(""))))  # the state ends only after these values
        if not self._cells_of(slots_of(returned)):
            return fill(returned, self._value_of)
        return Promise(lambda: self._result(returned))

    def _set_variables(self, variables: Variables) -> list[tuple[Cell, Any]]:
        """Set the variables; return (cell, structure) of those whose values must be combined from several values."""
        gathered = []
        for name, structure in self._graph.variables.items():
            cell = self._own_cell(structure) or Cell()
            variables[name] = cell
            if self._own_cell(structure) is None:
                gathered.append((cell, structure))
        return gathered

    def _own_cell(self, structure: Any) -> Cell | None:
        match structure:
            case Template(parts=(Slot(Produced(node_id), ()),)):
                return self._cells[node_id]
            case _:
                return None

    def _submit(self, nodes: Sequence[Node], interpreter: Interpreter) -> None:
        """Submit nodes, and the nodes of the branches that are forked from them."""
        waiting = [(nodes, interpreter)]
        while waiting:  # a list instead of recursion: forks of forks can be deeper than Python's stack
            nodes, interpreter = waiting.pop()
            for node in nodes:
                if isinstance(node.action, Fork):
                    branches = [self._graph.branches[branch].nodes for branch in node.action.branches]
                    forks = interpreter.fork(len(branches), node.site, is_hint=node.action.is_hint)
                    waiting += zip(branches, forks, strict=True)
                else:
                    cell = self._cells.get(node.node_id)
                    interpreter.submit(self._step(node, cell), node.site, cell)

    def _step(self, node: Node, cell: Cell | None) -> Step:
        match node.action:
            case Constant(text):
                return Text(text)
            case ReadText():
                assert cell is not None
                return Take(_into(cell, lambda snapshot: snapshot.text))
            case ReadWritten():
                assert cell is not None
                return TakeWritten(_into(cell, lambda written: written))
            case Gen() | RoleBegin() | RoleEnd() | ScopeBegin() | ScopeEnd() as expr:
                return expr
            case _:
                return Later(self._after(node.slots(), self._maker(node)))

    def _maker(self, node: Node) -> Callable[[], Expr]:
        """Return a function that creates a node's expression; call it when the needed values are available."""
        match node.action:
            case Insert(slot):
                return lambda: as_expr(slot.value(self._value_of))
            case Choose(name, choices, method):
                return lambda: Select(name, tuple(fill(list(choices), self._value_of)), method)
            case Adopt(source, index):
                return lambda: self._adopted(self._cells[source], index, self._cells[node.node_id])
            case action:
                raise AssertionError(f"{action} needs no values")

    def _adopted(self, source: Cell, index: int, cell: Cell) -> Text:
        value = source.future.result()
        text = value.value[index]
        meta_info = value.meta_info
        cell.fill(Value(text, meta_info[index] if isinstance(meta_info, list) else meta_info))
        return Text(text)

    def _after(self, slots: Iterable[Slot], make: Callable[[], Expr]) -> Callable[[], Awaitable[Expr]]:
        """Return a coroutine function that waits for the values of all slots, then calls `make`."""
        cells = self._cells_of(slots)

        async def made() -> Expr:
            for cell in cells:
                await arrival(cell.future)
            return make()

        return made

    def _filling(self, cell: Cell, structure: Any) -> Callable[[], Expr]:
        def make() -> Expr:
            cell.fill(Value(fill(structure, self._value_of)))
            return Text("")

        return make

    def _cells_of(self, slots: Iterable[Slot]) -> list[Cell]:
        sources = [slot.source for slot in slots]
        return [self._cells[s.node_id] for s in sources if isinstance(s, Produced | MetaInfo)]

    def _value_of(self, source: Source) -> Any:
        match source:
            case Argument(name):
                return self._arguments[name]
            case Produced(node_id):
                return self._cells[node_id].future.result().value
            case MetaInfo(node_id):
                return self._cells[node_id].future.result().meta_info

    def _result(self, returned: Any) -> Any:
        for cell in self._cells_of(slots_of(returned)):
            result_of(cell.future)
        return fill(returned, self._value_of)


def _into(cell: Cell, value_of: Callable[[T], Any]) -> "Future[T]":
    """Return a future whose result fills a cell, converted by `value_of`."""

    def keep(taken: "Future[T]") -> None:
        error = taken.exception()
        if isinstance(error, ProgramError):
            cell.fail(error)
        else:
            cell.fill(Value(value_of(taken.result())))

    future: Future[T] = Future()
    future.add_done_callback(keep)
    return future
