"""Passes over a graph. Each pass returns a graph that produces the same text and variables with less work."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, Final

from graftlm.errors import RequestError
from graftlm.lang.expressions import Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd
from graftlm.lang.graph import Graph
from graftlm.lang.nodes import ROOT, Action, Adopt, Branch, Choose, Constant, Fork, Insert, Node, ReadText, ReadWritten
from graftlm.lang.template import MetaInfo, Produced, Slot, Template, map_slots, slots_of

__all__ = ["drop_dead", "fold_constants", "merge_prefixes", "share_requests"]

#: A common beginning of branches' texts is moved before their fork if it has at least this number of characters.
_MIN_COMMON_CHARACTERS: Final = 16

#: Maximum number of completions of one shared request. With four, each branch pays for a quarter of a prompt; a larger
#: number saves little more. A large request may also exceed a backend's limit of `n`, or the size of its queue. Single
#: requests would wait for a place in the queue.
_MAX_SHARED: Final = 4


def fold_constants(graph: Graph) -> Graph:
    """Replace selects that have only one choice, and reads of these selects, by constants; join adjacent constants.

    A select that is a variable of the program is kept, because its scores may be read from the state.
    """
    known = _known_texts(graph)
    branches = {i: Branch(i, tuple(_merged(_folded(branch.nodes, known)))) for i, branch in graph.branches.items()}
    variables, returned = map_slots((dict(graph.variables), graph.returned), lambda slot: _known_or_slot(slot, known))
    return replace(graph, branches=branches, variables=variables, returned=returned)


def _known_texts(graph: Graph) -> dict[int, str]:
    """Return node id -> text of each select with a single, constant choice whose scores are not read."""
    read = [*slots_of((dict(graph.variables), graph.returned))]
    read += [slot for node in graph.nodes() for slot in node.slots()]
    scored = {slot.source.node_id for slot in read if isinstance(slot.source, MetaInfo)}
    scored |= set(_variable_nodes(graph))
    known: dict[int, str] = {}
    for node in sorted(graph.nodes(), key=lambda node: node.node_id):  # choices only contain values of earlier nodes
        if isinstance(node.action, Choose) and len(node.action.choices) == 1 and node.node_id not in scored:
            choice = map_slots(node.action.choices[0], lambda slot: _known_or_slot(slot, known))
            if isinstance(choice, str):
                known[node.node_id] = choice
    return known


def _variable_nodes(graph: Graph) -> Iterator[int]:
    """Yield the nodes whose values are variables of the program."""
    for structure in graph.variables.values():
        match structure:
            case Template(parts=(Slot(Produced(node_id), ()),)):
                yield node_id


def _known_or_slot(slot: Slot, known: Mapping[int, str]) -> Any:
    if not isinstance(slot.source, Produced) or slot.source.node_id not in known:
        return slot
    text = known[slot.source.node_id]
    return slot.value(lambda _: text)


def _folded(nodes: Sequence[Node], known: Mapping[int, str]) -> Iterator[Node]:
    for node in nodes:
        action: Action = node.action
        if node.node_id in known:
            action = Constant(known[node.node_id])
        elif isinstance(action, Insert) and isinstance(text := _known_or_slot(action.slot, known), str):
            action = Constant(text)
        elif isinstance(action, Choose):
            action = replace(action, choices=map_slots(action.choices, lambda slot: _known_or_slot(slot, known)))
        yield replace(node, action=action)


def _merged(nodes: Iterator[Node]) -> list[Node]:
    merged: list[Node] = []
    for node in nodes:
        if isinstance(node.action, Constant):
            if not node.action.text:
                continue
            if merged and isinstance(before := merged[-1].action, Constant):
                merged[-1] = replace(merged[-1], action=Constant(before.text + node.action.text))
                continue
        merged.append(node)
    return merged


def drop_dead(graph: Graph, outputs: Collection[str] | None = None) -> Graph:
    """Drop the nodes on which no result depends.

    A node depends on the nodes whose values it reads, and on all earlier nodes of its state, because these nodes
    produce its prompt.

    Args:
        outputs: names of the variables that are results, in addition to the returned value; None keeps all variables
            and the whole text.

    Raises:
        RequestError: the program has no variable of this name.
    """
    if unknown := set(outputs or ()) - set(graph.variables):
        raise RequestError(
            f"outputs names {', '.join(sorted(unknown))}; the program's variables are: "
            f"{', '.join(graph.variables) or 'none'}"
        )
    variables = {name: value for name, value in graph.variables.items() if outputs is None or name in outputs}
    live = _Liveness(graph)
    for slot in slots_of([list(variables.values()), graph.returned]):
        live.need_source(slot)
    if outputs is None:
        live.need_branch(ROOT)
    return replace(graph, branches=live.branches(), variables=variables)


class _Liveness:
    """The number of leading nodes of each branch that are live; all nodes before a live node are live too."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._places = {
            node.node_id: (branch.branch_id, i)
            for branch in graph.branches.values()
            for i, node in enumerate(branch.nodes)
        }
        self._origins = graph.origins()
        self._lens = {ROOT: 0}  # branch id -> number of leading nodes that are live; dead branches have no entry
        self._read: set[int] = set()

    def need_source(self, slot: Slot) -> None:
        """Mark the node that a slot reads as live."""
        if isinstance(slot.source, Produced | MetaInfo):
            self._read.add(slot.source.node_id)
            self._need(slot.source.node_id)

    def need_branch(self, branch_id: int) -> None:
        """Mark a whole branch as live."""
        if nodes := self._graph.branches[branch_id].nodes:
            self._need(nodes[-1].node_id)

    def _need(self, node_id: int) -> None:
        needed = [node_id]  # a list instead of recursion: programs can be deeper than Python's stack
        while needed:
            for node in self._newly_live(needed.pop()):
                sources = [slot.source for slot in node.slots()]
                ids = [source.node_id for source in sources if isinstance(source, Produced | MetaInfo)]
                self._read.update(ids)
                needed += ids

    def _newly_live(self, node_id: int) -> Iterator[Node]:
        """Yield the nodes that become live with a node: earlier nodes in its branch and in the branch's ancestors."""
        while True:
            branch_id, index = self._places[node_id]
            nodes = self._graph.branches[branch_id].nodes
            if isinstance(nodes[index].action, ScopeBegin):
                index = _scope_end(nodes, index)
            is_new = branch_id not in self._lens
            start = self._lens.get(branch_id, 0)
            self._lens[branch_id] = max(start, index + 1)
            yield from nodes[start : index + 1]
            if not is_new:
                return
            node_id = self._origins[branch_id]

    def branches(self) -> dict[int, Branch]:
        """Return the live branches, reduced to their live nodes."""
        return {
            i: Branch(i, tuple(self._kept(self._graph.branches[i].nodes[:n]))) for i, n in sorted(self._lens.items())
        }

    def _kept(self, nodes: Sequence[Node]) -> Iterator[Node]:
        for node in nodes:
            if isinstance(node.action, Fork):
                branches = tuple(branch for branch in node.action.branches if branch in self._lens)
                if branches:
                    yield replace(node, action=replace(node.action, branches=branches))
            elif not isinstance(node.action, ReadText | ReadWritten) or node.node_id in self._read:
                yield node


def _scope_end(nodes: Sequence[Node], begin: int) -> int:
    name = getattr(nodes[begin].action, "name")  # noqa: B009
    depth = 0
    for i in range(begin, len(nodes)):
        match nodes[i].action:
            case ScopeBegin(other) if other == name:
                depth += 1
            case ScopeEnd(other) if other == name:
                depth -= 1
                if depth == 0:
                    return i
    return len(nodes) - 1


class _Edit:
    """A copy of a graph to which nodes and branches can be added."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.branches = {i: list(branch.nodes) for i, branch in graph.branches.items()}
        self._next_node_id = 1 + max((node.node_id for node in graph.nodes()), default=0)

    def forks(self) -> list[tuple[int, Node, Fork]]:
        """Return (branch id, node, Fork) for each fork."""
        nodes = [(i, node) for i, nodes in self.branches.items() for node in nodes]
        return [(i, node, node.action) for i, node in nodes if isinstance(node.action, Fork)]

    def new_node(self, action: Action, like: Node) -> Node:
        """Return a new node with the program line of `like`."""
        self._next_node_id += 1
        return Node(self._next_node_id - 1, action, like.site)

    def new_branch(self, nodes: list[Node]) -> int:
        """Add a branch; returns its id."""
        branch_id = 1 + max(self.branches)
        self.branches[branch_id] = nodes
        return branch_id

    def replace(self, branch_id: int, node: Node, others: list[Node]) -> None:
        """Replace a node by other nodes."""
        nodes = self.branches[branch_id]
        at = nodes.index(node)
        nodes[at : at + 1] = others

    def graph(self) -> Graph:
        """Return the edited graph."""
        return replace(self._graph, branches={i: Branch(i, tuple(nodes)) for i, nodes in self.branches.items()})


def merge_prefixes(graph: Graph) -> Graph:
    """Move the common first nodes of a fork's branches before the fork, so that a backend caches their text once."""
    edit = _Edit(graph)
    for branch_id in list(edit.branches):
        edit.branches[branch_id] = _with_merged_forks(edit.branches[branch_id])
    for branch_id, node, fork in edit.forks():
        common = _take_common(edit, [edit.branches[branch] for branch in fork.branches])
        if common:
            trunk = edit.new_branch([*common, edit.new_node(fork, node)])
            edit.replace(branch_id, node, [replace(node, action=Fork((trunk,)))])
    return edit.graph()


def _with_merged_forks(nodes: list[Node]) -> list[Node]:
    """Merge adjacent forks into one, for example the forks of copies that are made one after the other."""
    merged: list[Node] = []
    for node in nodes:
        if merged and isinstance(fork := node.action, Fork) and isinstance(before := merged[-1].action, Fork):
            merged[-1] = replace(merged[-1], action=Fork((*before.branches, *fork.branches)))
        else:
            merged.append(node)
    return merged


def _take_common(edit: _Edit, branches: list[list[Node]]) -> list[Node]:
    """Remove the common first nodes from several branches and return these nodes."""
    common: list[Node] = []
    if any(isinstance(node.action, ReadWritten) for nodes in branches for node in nodes):
        return common  # the node reads the whole text of its branch, so the branch must keep its first nodes
    while len(branches) > 1 and all(branches):
        heads = [nodes[0] for nodes in branches]
        if all(head.action == heads[0].action for head in heads) and isinstance(
            heads[0].action, Constant | Insert | RoleBegin | RoleEnd
        ):
            common.append(heads[0])
            for nodes in branches:
                del nodes[0]
            continue
        texts = [head.action.text for head in heads if isinstance(head.action, Constant)]
        start = _common_start(texts) if len(texts) == len(heads) else ""
        if start:
            common.append(edit.new_node(Constant(start), heads[0]))
            for nodes, text in zip(branches, texts, strict=True):
                nodes[:1] = [replace(nodes[0], action=Constant(text[len(start) :]))] if text != start else []
        break
    return common


def _common_start(texts: list[str]) -> str:
    """Return the common beginning of texts without its last word, because a word's first token includes the space."""
    equal = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    start = "".join(letters[0] for letters in equal)
    start = start[: max(start.rfind(" "), start.rfind("\n"), 0)]
    return start if len(start) >= _MIN_COMMON_CHARACTERS else ""


def share_requests(graph: Graph, *, speculates: bool = False) -> Graph:
    """Let branches that begin with the same `gen` share requests for several completions.

    Each branch gets its own completion, with the same distribution as that of a separate request. The graph is valid
    only for runs that do not set a default for `n`.

    Args:
        speculates: whether one longer completion may answer several `gen`s of a branch. If so, branches with several
            `gen`s do not share requests: a shared completion answers only the first `gen`, so each branch would need
            another call.
    """
    edit = _Edit(graph)
    for branch_id, node, fork in edit.forks():
        groups = _groups_with_equal_gen(edit, fork, speculates)
        if not groups:
            continue
        sources = [_share(edit, group) for group in groups]
        adopting = [branch for group in groups for branch in group]
        others = [branch for branch in fork.branches if branch not in adopting]
        edit.replace(
            branch_id,
            node,
            [
                edit.new_node(Fork((*sources, *others), fork.is_hint), node),
                replace(node, action=Fork(tuple(adopting), is_hint=False)),  # no hint: the shared request caches it
            ],
        )
    return edit.graph()


def _groups_with_equal_gen(edit: _Edit, fork: Fork, speculates: bool) -> list[list[int]]:
    """Return groups of two to `_MAX_SHARED` branches of a fork that begin with `gen`s of equal sampling parameters."""
    groups: dict[Any, list[int]] = {}
    for branch in fork.branches:
        nodes = edit.branches[branch]
        if speculates and sum(isinstance(node.action, Gen) for node in nodes) > 1:
            continue
        if nodes and isinstance(gen := nodes[0].action, Gen) and gen.sampling.n is None:
            groups.setdefault(gen.sampling, []).append(branch)
    return [few for group in groups.values() if len(group) > 1 for few in _split(group)]


def _split(group: list[int]) -> list[list[int]]:
    """Split a group into as few parts as possible, each of two to `_MAX_SHARED` branches."""
    num_parts = -(-len(group) // _MAX_SHARED)
    bounds = [i * len(group) // num_parts for i in range(num_parts + 1)]
    return [group[start:end] for start, end in pairwise(bounds)]


def _share(edit: _Edit, group: list[int]) -> int:
    """Add a branch with one request for the whole group, whose branches adopt its completions; return its id."""
    first = edit.branches[group[0]][0]
    assert isinstance(first.action, Gen)
    source = edit.new_node(Gen(None, replace(first.action.sampling, n=len(group)), may_split=True), first)
    for i, branch in enumerate(group):
        nodes = edit.branches[branch]
        nodes[0] = replace(nodes[0], action=Adopt(source.node_id, i))
    return edit.new_branch([source])
