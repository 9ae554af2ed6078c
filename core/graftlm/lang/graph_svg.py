"""Draws a graph: one column per state, time downwards."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from graftlm.lang.labels import node_label, variable_line
from graftlm.lang.nodes import ROOT, Branch, Fork, Node, fork_nodes
from graftlm.lang.template import MetaInfo, Produced, slots_of

__all__ = ["draw"]

# Sizes in pixels; a monospace letter of 11 px is about 6.7 px wide.
_BOX_WIDTH: Final = 200
_BOX_HEIGHT: Final = 24
_COLUMN: Final = 240
_ROW: Final = 40
_MARGIN: Final = 20
_LABEL_CHARACTERS: Final = 27

#: Kind of node -> fill colour. Other kinds have the colour of text.
_FILLS: Final = {
    "text": "#f4f4f4",
    "argument": "#fff3d1",
    "read": "#fff3d1",
    "gen": "#d5e8fb",
    "take": "#d5e8fb",
    "select": "#dcf2dc",
    "fork": "#efe0f7",
    "variable": "#ffffff",
}


@dataclass(frozen=True, slots=True)
class _Box:
    """The box of a node or of a variable.

    Attributes:
        column, row: position, from 0.
        title: the whole label, shown as a tooltip.
    """

    column: int
    row: int
    kind: str
    title: str

    @property
    def x(self) -> int:
        """The left edge."""
        return _MARGIN + self.column * _COLUMN

    @property
    def y(self) -> int:
        """The upper edge."""
        return _MARGIN + self.row * _ROW

    @property
    def middle(self) -> int:
        """The horizontal middle."""
        return self.x + _BOX_WIDTH // 2


@dataclass(frozen=True, slots=True)
class _Edge:
    start: _Box
    end: _Box
    is_read: bool


def draw(heading: str, branches: Mapping[int, Branch], variables: Mapping[str, Any]) -> str:
    """Return an SVG document. Every node is drawn below the nodes that it waits for.

    Args:
        heading: title of the document.
        branches: branch id -> branch of a Graph.
        variables: name -> variable of a Graph.
    """
    boxes, edges = _layout(branches, variables)
    width = 2 * _MARGIN + max(box.column for box in boxes) * _COLUMN + _BOX_WIDTH if boxes else 2 * _MARGIN
    height = 2 * _MARGIN + max((box.row for box in boxes), default=0) * _ROW + _BOX_HEIGHT
    body = [line for edge in edges for line in _drawn_edge(edge)] + [line for box in boxes for line in _drawn_box(box)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="monospace" font-size="11">',
            f"<title>{escape(heading)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#666"/></marker></defs>',
            '<rect width="100%" height="100%" fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _layout(branches: Mapping[int, Branch], variables: Mapping[str, Any]) -> tuple[list[_Box], list[_Edge]]:
    """Return boxes and edges. Each branch has a column, to the right of the branch that it is forked from."""
    before = _waits_for(branches)
    rows = _rows(before)
    columns = {branch_id: i for i, branch_id in enumerate(_in_fork_order(branches))}
    place = {
        node.node_id: _Box(columns[branch.branch_id], rows[node.node_id], *_label(node))
        for branch in branches.values()
        for node in branch.nodes
    }
    edges = [
        _Edge(place[start], place[node_id], is_read)
        for node_id, starts in before.items()
        for start, is_read in starts.items()
    ]
    boxes = list(place.values())
    at = max((box.row for box in boxes), default=-1) + 1
    for name, value in variables.items():
        box = _Box(0, at, "variable", variable_line(name, value))
        sources = {slot.source.node_id for slot in slots_of(value) if isinstance(slot.source, Produced | MetaInfo)}
        edges += [_Edge(place[node_id], box, True) for node_id in sorted(sources)]
        boxes.append(box)
        at += 1
    return boxes, edges


def _waits_for(branches: Mapping[int, Branch]) -> dict[int, dict[int, bool]]:
    """Return node id -> {id of a node that it waits for: whether the edge is a read of that node's value}."""
    origins = fork_nodes(branches)
    before: dict[int, dict[int, bool]] = {}
    for branch in branches.values():
        last = origins.get(branch.branch_id)
        for node in branch.nodes:
            sources = [slot.source for slot in node.slots()]
            read = {source.node_id: True for source in sources if isinstance(source, Produced | MetaInfo)}
            before[node.node_id] = read | ({} if last is None else {last: False})
            last = node.node_id
    return before


def _rows(before: dict[int, dict[int, bool]]) -> dict[int, int]:
    """Return each node's row: the length of the longest path to it."""
    rows: dict[int, int] = {}
    for start in before:
        waiting = [start]
        while waiting:  # a list instead of recursion: programs can be deeper than Python's stack
            node_id = waiting[-1]
            missing = [other for other in before[node_id] if other not in rows]
            if missing:
                waiting += missing
                continue
            rows[node_id] = 1 + max((rows[other] for other in before[node_id]), default=-1)
            waiting.pop()
    return rows


def _in_fork_order(branches: Mapping[int, Branch]) -> Iterator[int]:
    """Yield branches, each followed by the branches that are forked from it."""
    waiting = [ROOT]
    while waiting:
        branch_id = waiting.pop()
        yield branch_id
        forks = [node.action for node in branches[branch_id].nodes if isinstance(node.action, Fork)]
        waiting += [branch for fork in reversed(forks) for branch in reversed(fork.branches)]


def _label(node: Node) -> tuple[str, str]:
    kind, detail = node_label(node)
    return kind, f"{node.node_id} {kind} {detail}".rstrip()


def _drawn_edge(edge: _Edge) -> Iterator[str]:
    start, end = edge.start, edge.end
    if edge.is_read:  # the arrow connects the boxes' sides; in one column, it bends around other boxes
        y1, y2 = start.y + _BOX_HEIGHT // 2, end.y + _BOX_HEIGHT // 2
        x1 = start.x + (_BOX_WIDTH if start.column < end.column else 0)
        x2 = end.x + (_BOX_WIDTH if end.column < start.column else 0)
        bend = (_COLUMN - _BOX_WIDTH) // 2
        before, behind = (bend if start.column < end.column else -bend), (bend if end.column < start.column else -bend)
        path = f"M{x1} {y1} C{x1 + before} {y1}, {x2 + behind} {y2}, {x2} {y2}"
    else:
        x1, y1, x2, y2 = start.middle, start.y + _BOX_HEIGHT, end.middle, end.y
        bend = max((y2 - y1) // 2, 8)
        path = f"M{x1} {y1} C{x1} {y1 + bend}, {x2} {y2 - bend}, {x2} {y2}"
    dashes = ' stroke-dasharray="4 3"' if edge.is_read else ""
    yield f'<path d="{path}" fill="none" stroke="#666"{dashes} marker-end="url(#tip)"/>'


def _drawn_box(box: _Box) -> Iterator[str]:
    title = box.title
    label = title if len(title) <= _LABEL_CHARACTERS else f"{title[: _LABEL_CHARACTERS - 1]}…"
    fill = _FILLS.get(box.kind, _FILLS["text"])
    yield f"<g><title>{escape(title)}</title>"
    size = f'width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}"'
    yield f'<rect x="{box.x}" y="{box.y}" {size} rx="4" fill="{fill}" stroke="#999"/>'
    yield f'<text x="{box.x + 8}" y="{box.y + 16}">{escape(label)}</text></g>'
