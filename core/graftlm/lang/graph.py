"""A traced program as a graph: the nodes of each state, in order, and the values that they read from each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graftlm.lang.graph_svg import draw
from graftlm.lang.labels import node_label, printable, shown, variable_line
from graftlm.lang.nodes import ROOT, Branch, Node, fork_nodes

__all__ = ["Graph"]


@dataclass(frozen=True, slots=True)
class Graph:
    """A program without its Python code.

    Attributes:
        name: name of the program.
        arguments: names of the free arguments.
        branches: branch id -> branch. ROOT is the program's first state; each other branch belongs to one Fork.
        variables: the variables of the first state at the program's end. Values are constants, Templates, and lists and
            mappings of constants and Templates.
        returned: the function's return value, in the same form as `variables`.
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
        """Return the id of the Fork at which each branch begins; ROOT is not included."""
        return fork_nodes(self.branches)

    def to_text(self) -> str:
        """Return the graph as text, with one line per node."""
        origins = self.origins()
        lines = [self._heading()]
        for branch in self.branches.values():
            origin = "" if branch.branch_id == ROOT else f", from {origins[branch.branch_id]}"
            lines.append(f"state {branch.branch_id}{origin}")
            for node in branch.nodes:
                kind, detail = node_label(node)
                lines.append(f"  {node.node_id:3}  {kind:8}  {detail}".rstrip())
        lines += [variable_line(name, value) for name, value in self.variables.items()]
        if self.returned is not None:
            lines.append(f"returns {shown(self.returned)}")
        return "\n".join(lines)

    __str__ = to_text

    def to_svg(self) -> str:
        """Return an SVG drawing: one column per state, time downwards; dashed arrows mark reads of values."""
        return draw(self._heading(), self.branches, self.variables)

    def label(self, node: Node) -> tuple[str, str]:
        """Return a node's kind, as one word, and its details."""
        return node_label(node)

    def _heading(self) -> str:
        return f"{printable(self.name)}({', '.join(self.arguments)})"
