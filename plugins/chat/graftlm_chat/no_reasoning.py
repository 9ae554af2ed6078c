"""The reasoning format `none`: all text is content."""

from collections.abc import Sequence

from graftlm.contracts import ContentDelta, ReasoningDelta, ReasoningFormat, ReasoningParser

__all__ = ["NoReasoning"]


class _ContentOnly(ReasoningParser):
    def push(self, text: str) -> Sequence[ReasoningDelta | ContentDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> Sequence[ReasoningDelta | ContentDelta]:
        return []


class NoReasoning(ReasoningFormat):
    """Does not separate reasoning from content."""

    end = ""

    def is_open(self, prompt_end: str) -> bool:
        """Return False."""
        return False

    def parser(self, *, is_open: bool) -> ReasoningParser:
        """Return a parser that returns all text as content."""
        return _ContentOnly()
