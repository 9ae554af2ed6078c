"""A traced program: for each of its states the nodes that it runs in order, and what they read of one another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graftlm.lang.call_site import CallSite
from graftlm.lang.choices import ChoicesMethod
from graftlm.lang.expressions import Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd
from graftlm.lang.template import Argument, MetaInfo, Produced, Slot, Source, Template, slots_of

__all__ = [
    "ROOT",
    "Action",
    "Adopt",
    "Branch",
    "Choose",
    "Constant",
    "Fork",
    "Graph",
    "Insert",
    "Node",
    "ReadText",
    "ReadWritten",
    "argument_names",
    "printable",
    "shown",
    "variable_kind",
    "variable_line",
]

#: The branch of the state that the program is given.
ROOT = 0


@dataclass(frozen=True, slots=True)
class Constant:
    """Appends text."""

    text: str


@dataclass(frozen=True, slots=True)
class Insert:
    """Appends an argument, or what another node has produced."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Choose:
    """Appends the likeliest choice; see Select."""

    name: str | None
    choices: tuple[str | Template, ...]
    method: ChoicesMethod


@dataclass(frozen=True, slots=True)
class Fork:
    """Lets branches go on from here.

    Attributes:
        branches: their ids.
        is_hint: whether the text so far is worth caching before they begin.
    """

    branches: tuple[int, ...]
    is_hint: bool = True


@dataclass(frozen=True, slots=True)
class ReadText:
    """Produces the text so far."""


@dataclass(frozen=True, slots=True)
class ReadWritten:
    """Produces what its branch has written, with the messages of a chat."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Appends one of the `n` completions of another node."""

    node_id: int
    index: int


Action = (
    Constant
    | Insert
    | Choose
    | Fork
    | ReadText
    | ReadWritten
    | Adopt
    | Gen
    | RoleBegin
    | RoleEnd
    | ScopeBegin
    | ScopeEnd
)


@dataclass(frozen=True, slots=True)
class Node:
    """One thing that a state does.

    Attributes:
        node_id: of its own in the graph; a pass that keeps a node keeps its id.
        site: the program's line.
    """

    node_id: int
    action: Action
    site: CallSite

    def slots(self) -> Iterator[Slot]:
        """Yield the values that it needs."""
        match self.action:
            case Insert(slot):
                yield slot
            case Choose(choices=choices):
                yield from slots_of(choices)
            case Adopt(node_id):
                yield Slot(Produced(node_id))

    def produces(self) -> bool:
        """Whether others can read what it leaves."""
        return isinstance(self.action, Choose | ReadText | ReadWritten | Adopt | Gen | ScopeBegin)


@dataclass(frozen=True, slots=True)
class Branch:
    """One state: its nodes in order."""

    branch_id: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A program without its Python.

    Attributes:
        name: the program's.
        arguments: names of those that are not constants.
        branches: by id; ROOT is the program's own state, every other one is named by one Fork.
        variables: of the program's own state at its end: constants, Templates, and lists and mappings of them.
        returned: what its function returns, likewise.
    """

    name: str
    arguments: tuple[str, ...]
    branches: Mapping[int, Branch]
    variables: Mapping[str, Any] = field(default_factory=dict)
    returned: Any = None

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, branch by branch."""
        for branch in self.branches.values():
            yield from branch.nodes

    def origins(self) -> dict[int, int]:
        """Return, for each branch but the first, the id of the Fork that it goes on from."""
        forks = [(node.node_id, node.action) for node in self.nodes()]
        return {branch: node_id for node_id, action in forks if isinstance(action, Fork) for branch in action.branches}

    def to_text(self) -> str:
        """Return one line for each node."""
        origins = self.origins()
        lines = [f"{printable(self.name)}({', '.join(self.arguments)})"]
        for branch in self.branches.values():
            origin = "" if branch.branch_id == ROOT else f", from {origins[branch.branch_id]}"
            lines.append(f"state {branch.branch_id}{origin}")
            for node in branch.nodes:
                kind, detail = self.label(node)
                lines.append(f"  {node.node_id:3}  {kind:8}  {detail}".rstrip())
        lines += [variable_line(name, value) for name, value in self.variables.items()]
        if self.returned is not None:
            lines.append(f"returns {shown(self.returned)}")
        return "\n".join(lines)

    __str__ = to_text

    def to_svg(self) -> str:
        """Return a drawing: a column for each state, time downwards, dashed arrows for what is read across states."""
        from graftlm.lang.graph_svg import draw

        return draw(self)

    def label(self, node: Node) -> tuple[str, str]:
        """Return a node's kind, as one word, and what it is about."""
        match node.action:
            case Constant(text):
                return "text", repr(text)
            case Insert(slot):
                return ("argument" if isinstance(slot.source, Argument) else "read"), _shown_slot(slot)
            case Gen(name, sampling):
                given = ", ".join(f"{key}={value!r}" for key, value in sampling.given().items())
                return "gen", f"{printable(name or '-')}({given})"
            case Choose(name, choices):
                return "select", f"{printable(name or '-')} of {', '.join(shown(choice) for choice in choices)}"
            case Fork(branches):
                return "fork", ", ".join(f"state {branch}" for branch in branches)
            case ReadText():
                return "text()", ""
            case ReadWritten():
                return "written", ""
            case Adopt(node_id, index):
                return "take", f"completion {index} of {node_id}"
            case RoleBegin(role):
                return "begin", printable(role)
            case RoleEnd(role):
                return "end", printable(role)
            case ScopeBegin(name):
                return "scope", printable(name)
            case ScopeEnd(name):
                return "unscope", printable(name)


def argument_names(structure: Any) -> list[str]:
    """Return the names of the arguments that a value depends on."""
    return [slot.source.name for slot in slots_of(structure) if isinstance(slot.source, Argument)]


def printable(name: str) -> str:
    """Return a name in one line of letters: control characters and the like as Python writes them."""
    return name if name.isprintable() else repr(name)[1:-1]


def variable_line(name: str, value: Any) -> str:
    """Return what a variable is, in one line."""
    return f"{variable_kind(value)} {printable(name)} = {shown(value)}"


def variable_kind(value: Any) -> str:
    """Return "join" for a list of what nodes produce, which is what a join makes, and "variable" for others."""
    return "join" if isinstance(value, list) and any(slots_of(value)) else "variable"


def shown(structure: Any) -> str:
    """Return a value with slots as a reader wants to see it."""
    match structure:
        case Template(parts):
            return " + ".join(repr(part) if isinstance(part, str) else _shown_slot(part) for part in parts)
        case list() | tuple():
            return f"[{', '.join(shown(entry) for entry in structure)}]"
        case dict():
            return "{" + ", ".join(f"{key!r}: {shown(entry)}" for key, entry in structure.items()) + "}"
        case _:
            return repr(structure)


def _shown_slot(slot: Slot) -> str:
    return _shown_source(slot.source) + "".join(str(conversion) for conversion in slot.conversions)


def _shown_source(source: Source) -> str:
    match source:
        case Argument(name):
            return name
        case Produced(node_id):
            return f"#{node_id}"
        case MetaInfo(node_id):
            return f"meta of #{node_id}"
