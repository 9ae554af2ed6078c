"""Conversion of values to Markdown: escaped text, and tables."""

import re
from collections.abc import Iterable, Sequence

__all__ = ["code", "plain", "table"]

_CODE_SPAN = re.compile(r"(`[^`]*`)")


def code(text: str) -> str:
    """Return a text as a code span."""
    return f"`{text}`"


def plain(text: str) -> str:
    """Return a text on one line; characters outside code spans that Markdown or HTML would interpret are escaped."""
    parts = _CODE_SPAN.split(" ".join(text.split()))
    return "".join(part if i % 2 else _escape(part) for i, part in enumerate(parts))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells must be Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _escape(text: str) -> str:
    for mark, escaped in (("<", "&lt;"), ("|", "\\|"), ("*", "\\*")):
        text = text.replace(mark, escaped)
    return text
