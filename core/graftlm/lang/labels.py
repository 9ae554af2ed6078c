"""Labels of a graph's nodes and values in texts and drawings."""

from typing import Any

from graftlm.lang.expressions import Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd
from graftlm.lang.nodes import Adopt, Choose, Constant, Fork, Insert, Node, ReadText, ReadWritten
from graftlm.lang.template import Argument, MetaInfo, Produced, Slot, Source, Template, slots_of

__all__ = ["node_label", "printable", "shown", "variable_kind", "variable_line"]


def node_label(node: Node) -> tuple[str, str]:
    """Return a node's kind, as one word, and its details."""
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


def printable(name: str) -> str:
    """Return a name in one line; control characters are escaped as in Python."""
    return name if name.isprintable() else repr(name)[1:-1]


def variable_line(name: str, value: Any) -> str:
    """Return one line that describes a variable."""
    return f"{variable_kind(value)} {printable(name)} = {shown(value)}"


def variable_kind(value: Any) -> str:
    """Return "join" for a list with values of nodes, because joins create such lists; "variable" for other values."""
    return "join" if isinstance(value, list) and any(slots_of(value)) else "variable"


def shown(structure: Any) -> str:
    """Return a readable form of a value with slots."""
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
