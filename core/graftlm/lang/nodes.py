"""The nodes of a traced program. A branch has the nodes of one state, in order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graftlm.lang.call_site import CallSite
from graftlm.lang.choices import CallableMethod, ChoicesMethod
from graftlm.lang.expressions import Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd
from graftlm.lang.template import Produced, Slot, Template, slots_of

__all__ = [
    "ROOT",
    "Action",
    "Adopt",
    "Branch",
    "Choose",
    "Constant",
    "Fork",
    "Insert",
    "Node",
    "ReadText",
    "ReadWritten",
    "fork_nodes",
]

#: The branch of the program's first state, which the other states are forked from.
ROOT = 0


@dataclass(frozen=True, slots=True)
class Constant:
    """Appends text."""

    text: str


@dataclass(frozen=True, slots=True)
class Insert:
    """Appends an argument, or the value of another node."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Choose:
    """Appends the most likely choice; see Select."""

    name: str | None
    choices: tuple[str | Template, ...]
    method: ChoicesMethod | CallableMethod


@dataclass(frozen=True, slots=True)
class Fork:
    """Begins branches that continue from here.

    Attributes:
        branches: ids of the branches.
        is_hint: whether the backend should cache the text so far before the branches begin.
    """

    branches: tuple[int, ...]
    is_hint: bool = True


@dataclass(frozen=True, slots=True)
class ReadText:
    """Produces the text so far."""


@dataclass(frozen=True, slots=True)
class ReadWritten:
    """Produces everything that its branch has appended, including chat messages."""


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
    """One action of a state.

    Attributes:
        node_id: unique in the graph. A pass that keeps a node keeps its id.
        site: the program's line.
    """

    node_id: int
    action: Action
    site: CallSite

    def slots(self) -> Iterator[Slot]:
        """Yield the slots whose values the action needs."""
        match self.action:
            case Insert(slot):
                yield slot
            case Choose(choices=choices):
                yield from slots_of(choices)
            case Adopt(node_id):
                yield Slot(Produced(node_id))

    def produces(self) -> bool:
        """Whether the action has a value that other nodes can read."""
        return isinstance(self.action, Choose | ReadText | ReadWritten | Adopt | Gen | ScopeBegin)


@dataclass(frozen=True, slots=True)
class Branch:
    """One state: its nodes in order."""

    branch_id: int
    nodes: tuple[Node, ...]


def fork_nodes(branches: Mapping[int, Branch]) -> dict[int, int]:
    """Return the id of the Fork at which each branch begins; ROOT is not included."""
    forks = [(node.node_id, node.action) for branch in branches.values() for node in branch.nodes]
    return {branch: node_id for node_id, action in forks if isinstance(action, Fork) for branch in action.branches}
