"""`none`: all text is content."""

from collections.abc import Sequence

from graftlm.contracts import ContentDelta, ReasoningDelta, ReasoningFormat, ReasoningParser

__all__ = ["NoReasoning"]


class _Through(ReasoningParser):
    def push(self, text: str) -> Sequence[ReasoningDelta | ContentDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> Sequence[ReasoningDelta | ContentDelta]:
        return []


class NoReasoning(ReasoningFormat):
    """Tells no reasoning apart."""

    end = ""

    def is_open(self, prompt_end: str) -> bool:
        """Return False."""
        return False

    def parser(self, *, is_open: bool) -> ReasoningParser:
        """Return a parser to which all is content."""
        return _Through()
