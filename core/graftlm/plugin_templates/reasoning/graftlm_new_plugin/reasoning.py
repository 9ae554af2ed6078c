"""The reasoning format: reasoning is between two tags, and only at the beginning of an answer."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from graftlm.contracts import ContentDelta, ReasoningDelta, ReasoningFormat, ReasoningParser

__all__ = ["BEGIN", "TaggedReasoning"]

BEGIN: Final = "<reasoning>"
END: Final = "</reasoning>"
#: Maximum number of line breaks after the reasoning that are removed.
_NUM_LINE_ENDS: Final = 2


class _Place(Enum):
    START = auto()
    REASONING = auto()
    GAP = auto()
    CONTENT = auto()


class _TagParser(ReasoningParser):
    """A parser that delays only text that may be the beginning of a tag."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._held = ""

    def push(self, text: str) -> Sequence[ReasoningDelta | ContentDelta]:
        """Parse more text; return the deltas that no later text can change."""
        self._held += text
        if self._place is _Place.START and not self._passed_start():
            return []
        reasoning = self._take_reasoning() if self._place is _Place.REASONING else ""
        if self._place is _Place.GAP:
            self._pass_gap()
        content = self._take_all() if self._place is _Place.CONTENT else ""
        return _deltas(reasoning, content)

    def finish(self) -> Sequence[ReasoningDelta | ContentDelta]:
        """Parse the end of the text; return the delayed text."""
        held = self._take_all()
        if self._place is _Place.GAP:
            return []
        return _deltas(held, "") if self._place is _Place.REASONING else _deltas("", held)

    def _passed_start(self) -> bool:
        """Determine whether the answer begins with BEGIN. Return False if more text is needed to decide this."""
        if self._held.startswith(BEGIN):
            self._place, self._held = _Place.REASONING, self._held[len(BEGIN) :]
        elif not BEGIN.startswith(self._held):
            self._place = _Place.CONTENT
        return self._place is not _Place.START

    def _take_reasoning(self) -> str:
        reasoning, end, rest = self._held.partition(END)
        if end:
            self._place, self._held = _Place.GAP, rest
            return reasoning
        certain = len(self._held) - _overlap(self._held, END)
        reasoning, self._held = self._held[:certain], self._held[certain:]
        return reasoning

    def _pass_gap(self) -> None:
        rest = self._held[:_NUM_LINE_ENDS].lstrip("\n") + self._held[_NUM_LINE_ENDS:]
        if rest:
            self._place, self._held = _Place.CONTENT, rest

    def _take_all(self) -> str:
        held, self._held = self._held, ""
        return held


class TaggedReasoning(ReasoningFormat):
    """The format of reasoning between tags. A chat template may write the first tag at the end of the prompt."""

    end = END
    begin = BEGIN

    def is_open(self, prompt_end: str) -> bool:
        """Return whether the prompt ends with the first tag."""
        return prompt_end.rstrip().endswith(BEGIN)

    def parser(self, *, is_open: bool) -> ReasoningParser:
        """Return a parser for one completion."""
        return _TagParser(_Place.REASONING if is_open else _Place.START)


def _overlap(text: str, tag: str) -> int:
    """Return the number of characters at the end of a text that may be the beginning of a tag."""
    return next(size for size in reversed(range(len(tag))) if text.endswith(tag[:size]))


def _deltas(reasoning: str, content: str) -> Sequence[ReasoningDelta | ContentDelta]:
    parts = (ReasoningDelta(reasoning) if reasoning else None, ContentDelta(content) if content else None)
    return [part for part in parts if part is not None]
