"""Runs a program's function without a model, and records its expressions as a graph."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import zip_longest
from types import CodeType, FunctionType
from typing import Any, Final, NoReturn, cast

from graftlm.errors import ProgramError, TraceError
from graftlm.lang import expressions as ex
from graftlm.lang.bound import free_signature
from graftlm.lang.call_site import CallSite, call_site, error_at, raising_site
from graftlm.lang.graph import Graph
from graftlm.lang.nodes import Action, Branch, Choose, Constant, Fork, Insert, Node, ReadText, ReadWritten
from graftlm.lang.placeholder import MarkKind, Marks, Placeholder, mark_kinds
from graftlm.lang.sampling import Sampling
from graftlm.lang.state import ProgramState
from graftlm.lang.steps import Action as Step
from graftlm.lang.steps import End, Snapshot, Take, TakeWritten
from graftlm.lang.template import Argument, MetaInfo, Produced, argument_names, slots_of
from graftlm.lang.text_feed import TextFeed
from graftlm.lang.variables import Cell, Value, Variables

__all__ = ["trace", "trace_prefix"]

#: Maximum number of nodes; real programs have fewer. A loop until a certain text is generated would never end in a
#: trace.
_MAX_NODES: Final = 100_000
_MAX_PREFIX_NODES: Final = 1000

#: Maximum length of the program's strings that marks must not contain. Longer strings are ignored: programs search
#: texts for words, rarely for paragraphs, and long strings make marks long.
_MAX_LITERAL_CHARACTERS: Final = 64

#: Collections with more elements are not searched for strings: they are probably data, not words that the program
#: searches texts for.
_MAX_LITERALS: Final = 64


def trace(function: Callable[..., Any], constants: Mapping[str, Any], *, max_nodes: int = _MAX_NODES) -> Graph:
    """Return a program's graph.

    The function runs several times. Each run represents unknown values in strings by another kind of marks, such as
    letters, digits or spaces.

    Args:
        max_nodes: a program with more nodes is assumed to be endless.

    Raises:
        TraceError: the program's expressions depend on values that are not known yet.
        RequestError: a constant is no argument of the function.
    """
    first, *others = mark_kinds(_literals(function))
    graph = _whole_graph(function, constants, first, max_nodes)
    for kind in others:
        _check_same(graph, _whole_graph(function, constants, kind, max_nodes))
    return graph


def trace_prefix(function: Callable[..., Any], constants: Mapping[str, Any]) -> Graph:
    """Return the graph of a program's expressions before the first one that cannot be traced; its size is limited.

    The function runs once. Its errors are ignored, because it will raise them again in a real run.
    """
    recording, _ = _record(function, constants, mark_kinds(())[0], _MAX_PREFIX_NODES)
    return recording.graph(is_whole=False)


def _literals(function: Callable[..., Any]) -> list[str]:
    """Return the short strings in a function, and in the globals and the functions of its file that it uses.

    The globals and functions that these functions use are searched too.
    """
    function = inspect.unwrap(function)
    filename = getattr(getattr(function, "__code__", None), "co_filename", None)
    found: dict[str, None] = {}  # a dictionary as an ordered set
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting:
        match waiting.pop():
            case FunctionType(__code__=code) as other if code.co_filename == filename and id(other) not in seen:
                seen.add(id(other))
                waiting += [code, *_named(other, code)]
            case CodeType(co_consts=values):
                waiting += values
            case tuple() | list() | set() | frozenset() as values if len(values) <= _MAX_LITERALS:
                waiting += [value for value in values if isinstance(value, str | tuple | frozenset)]
            case str(text) if 1 < len(text) <= _MAX_LITERAL_CHARACTERS:
                found[text] = None
    return list(found)


def _named(function: FunctionType, code: CodeType) -> Iterator[Any]:
    """Yield the globals and closure variables that a function reads."""
    found = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    yield from (inspect.unwrap(value) if callable(value) else value for value in found)


def _whole_graph(function: Callable[..., Any], constants: Mapping[str, Any], kind: MarkKind, max_nodes: int) -> Graph:
    recording, error = _record(function, constants, kind, max_nodes)
    if error is not None:
        raise error
    return recording.graph()


@dataclass
class _Recording:
    """A graph under construction, with all states of one run."""

    name: str
    arguments: tuple[str, ...]
    marks: Marks
    max_nodes: int
    branches: dict[int, list[Node]] = field(default_factory=dict)
    num_nodes: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)
    returned: Any = None

    def add(self, branch_id: int, action: Action, site: CallSite) -> int:
        """Add a node to a branch; returns its id."""
        if self.num_nodes == self.max_nodes:
            self.marks.stop(
                f"it has more than {self.max_nodes} expressions; does a loop wait for a generated text?", site
            )
        node = Node(self.num_nodes, action, site)
        self.num_nodes += 1
        self.branches[branch_id].append(node)
        return node.node_id

    def begin_branch(self) -> int:
        """Return the id of a new branch."""
        self.branches[len(self.branches)] = []
        return len(self.branches) - 1

    def graph(self, *, is_whole: bool = True) -> Graph:
        """Return the recorded graph; unless `is_whole`, it has no variables and no return value."""
        branches = {i: Branch(i, tuple(nodes)) for i, nodes in self.branches.items()}
        if not is_whole:
            return Graph(self.name, self.arguments, branches)
        variables = {name: self.marks.structure(value) for name, value in self.variables.items()}
        return Graph(self.name, self.arguments, branches, variables, self.marks.structure(self.returned))


def _record(
    function: Callable[..., Any], constants: Mapping[str, Any], kind: MarkKind, max_nodes: int
) -> tuple[_Recording, ProgramError | None]:
    """Run the function once; return the recording, and the error that stopped it, if any."""
    arguments = list(free_signature(function, constants).parameters)[1:]
    code = getattr(inspect.unwrap(function), "__code__", None)
    filename = "" if code is None else code.co_filename  # "" for a callable object: errors then name the caller's line
    marks = Marks(filename, kind)
    recording = _Recording(function.__name__, tuple(arguments), marks, max_nodes)
    variables = Variables()
    state = ProgramState(_Recorder(recording, recording.begin_branch()), variables)
    placeholders = {name: Placeholder.of(marks, Argument(name)) for name in arguments}
    try:
        state.run(function, **placeholders, **constants)
    except TraceError as error:
        return recording, marks.stopped or error
    except Exception as error:
        return recording, marks.stopped or _of_function(error, filename)
    recording.variables = {name: cell.future.result().value for name, cell in variables.copy().items()}
    recording.returned = state.ret_value
    return recording, marks.stopped


def _of_function(error: Exception, filename: str) -> TraceError:
    """Return the TraceError for an exception of the function; a placeholder may have caused it."""
    made = _error(
        f"it raised {type(error).__name__}: {error}\n  in a trace, free arguments and generated texts are "
        "placeholders, which other code may not accept",
        raising_site(error, filename),
    )
    made.__cause__ = error
    return made


class _Recorder:
    """Replaces the Interpreter of a state: it records expressions instead of running them."""

    def __init__(self, recording: _Recording, branch_id: int) -> None:
        self._recording = recording
        self._marks = recording.marks
        self._branch_id = branch_id

    @property
    def feed(self) -> TextFeed:
        """Raise TraceError, because no text grows in a trace."""
        return self._marks.stop("it reads the text during generation (text_iter)")

    @property
    def error(self) -> ProgramError | None:
        """Always None: in a trace, no expression runs."""
        return None

    def fail(self, error: ProgramError) -> None:
        """Do nothing: in a trace, no expression runs."""

    def fork(self, number: int, site: CallSite) -> "list[_Recorder]":
        """Record a fork and return a recorder for each branch."""
        branches = [self._recording.begin_branch() for _ in range(number)]
        self._add(Fork(tuple(branches)), site)
        return [_Recorder(self._recording, branch) for branch in branches]

    def submit(self, action: Step, site: CallSite | None = None, cell: Cell | None = None) -> None:
        """Record an expression; the value of its variable is a placeholder."""
        site = site or call_site()
        match action:
            case Take(taken):
                self._take(taken, site)
            case TakeWritten(written):
                written.set_result(Placeholder.of(self._marks, Produced(self._add(ReadWritten(), site))))
            case End(ended):
                ended.set_result(None)
            case _:
                for recorded in self._actions(action, site):
                    self._fill(cell, self._add(recorded, site))

    def _add(self, action: Action, site: CallSite) -> int:
        return self._recording.add(self._branch_id, action, site)

    def _actions(self, expr: Any, site: CallSite) -> Iterator[Action]:
        match expr:
            case Placeholder() | ex.Text():
                parts = expr.template.parts if isinstance(expr, Placeholder) else self._marks.parse(expr.text)
                yield from (Constant(part) if isinstance(part, str) else Insert(part) for part in parts)
            case ex.Gen(sampling=sampling, reasoning=reasoning):
                if reasoning is not None:
                    self._marks.stop("separate_reasoning is not supported: it makes two variables of one answer", site)
                self._check_constant(sampling, site)
                yield expr
            case ex.Select(name, choices, method):
                yield Choose(name, self._marks.structure(choices), method)
            case ex.RoleBegin() | ex.RoleEnd() | ex.ScopeBegin() | ex.ScopeEnd():
                yield expr
            case _:
                self._marks.stop(f"{type(expr).__name__} is not supported in a graph", site)

    def _check_constant(self, sampling: Sampling, site: CallSite) -> None:
        for name, value in sampling.given().items():
            given = self._marks.structure(value)
            if any(slots_of(given)):
                free = ", ".join(argument_names(given))
                fix = f"pass {free} as constants" if free else "it cannot depend on generated text"
                self._marks.stop(f"gen({name}=...) is not constant; {fix}", site)

    def _fill(self, cell: Cell | None, node_id: int) -> None:
        if cell is None:
            return
        value = Placeholder.of(self._marks, Produced(node_id))
        meta_info = cast("dict[str, Any]", Placeholder.of(self._marks, MetaInfo(node_id)))
        cell.future.set_result(Value(value, meta_info))
        cell.feed.end(TraceError("the program cannot be traced: it reads a variable during generation (text_iter)"))

    def _take(self, taken: "Future[Snapshot]", site: CallSite) -> None:
        node_id = self._add(ReadText(), site)
        text = cast("str", Placeholder.of(self._marks, Produced(node_id)))
        taken.set_result(Snapshot(text, _NoMessages(self._marks)))


class _NoMessages(tuple[dict[str, str], ...]):
    """Placeholder for a chat's messages, which have no contents yet."""

    _marks: Marks

    def __new__(cls, marks: Marks) -> "_NoMessages":
        made = super().__new__(cls)
        made._marks = marks
        return made

    def __iter__(self) -> NoReturn:
        self._marks.stop("it calls messages(), whose contents are not known yet")


def _check_same(first: Graph, second: Graph) -> None:
    """Check that two traces have equal graphs.

    Raises:
        TraceError: they differ; the message names the first different line.
    """
    if first == second:
        return
    pairs = zip_longest(first.nodes(), second.nodes())
    node = next((one or other for one, other in pairs if one != other), None)
    raise _error(
        "two runs with the same arguments differ, so the program depends on randomness, on time, or on the characters "
        'of a text that is not known yet, for example by a width as in f"{x!r:>8}" or by len() of an f-string',
        None if node is None else node.site,
    )


def _error(what: str, site: CallSite | None) -> TraceError:
    return error_at(TraceError, f"the program cannot be traced: {what}", site)
