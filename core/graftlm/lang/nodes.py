"""The nodes of a traced program, in branches: what each of its states does, in order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graftlm.lang.call_site import CallSite
from graftlm.lang.choices import ChoicesMethod
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


def fork_nodes(branches: Mapping[int, Branch]) -> dict[int, int]:
    """Return, for each branch but the first, the id of the Fork that it goes on from."""
    forks = [(node.node_id, node.action) for branch in branches.values() for node in branch.nodes]
    return {branch: node_id for node_id, action in forks if isinstance(action, Fork) for branch in action.branches}
