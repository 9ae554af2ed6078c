"""`think`: reasoning between <think> and </think>, before the answer."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, TypeAlias

from graftlm.contracts import ContentDelta, ReasoningDelta, ReasoningFormat, ReasoningParser
from graftlm_chat.text_search import held_back

__all__ = ["ThinkFormat"]

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"
#: Line ends between the reasoning and the answer, at most.
_NUM_LINE_ENDS: Final = 2

_Delta: TypeAlias = ReasoningDelta | ContentDelta


class _Place(Enum):
    START = auto()
    REASONING = auto()
    #: After the reasoning, where line ends are no content yet.
    AFTER = auto()
    CONTENT = auto()


class _ThinkParser(ReasoningParser):
    """Reasoning stands at the beginning or nowhere; a tag further on is content."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._held = ""
        self._said = False

    def push(self, text: str) -> Sequence[_Delta]:
        self._held += text
        deltas: list[_Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> Sequence[_Delta]:
        held, self._held = self._held, ""
        if self._place is _Place.REASONING:
            held = held.rstrip() if self._said else held.strip()
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(held)] if held and self._place is not _Place.AFTER else []

    def _advance(self, deltas: list[_Delta]) -> bool:
        """Take what is certain out of what is held; returns whether another place has been reached."""
        match self._place:
            case _Place.START:
                return self._open()
            case _Place.REASONING:
                return self._reason(deltas)
            case _Place.AFTER:
                # Whatever else the answer begins with is its own: a grammar may ask for white space.
                rest = self._held[:_NUM_LINE_ENDS].lstrip("\n") + self._held[_NUM_LINE_ENDS:]
                return bool(rest) and self._go(_Place.CONTENT, rest)
        if self._held:
            deltas.append(ContentDelta(self._held))
            self._held = ""
        return False

    def _open(self) -> bool:
        start = self._held.lstrip()
        if start.startswith(_OPEN):
            return self._go(_Place.REASONING, start[len(_OPEN) :])
        return not _OPEN.startswith(start) and self._go(_Place.CONTENT, self._held)

    def _reason(self, deltas: list[_Delta]) -> bool:
        text, close, rest = self._held.partition(_CLOSE)
        # White space at either end of the reasoning is the template's.
        text = text if self._said else text.lstrip()
        if close:
            self._say(text.rstrip(), deltas)
            return self._go(_Place.AFTER, rest)
        certain = text[: len(text) - held_back(text, _CLOSE)].rstrip()
        self._say(certain, deltas)
        self._held = text[len(certain) :]
        return False

    def _say(self, text: str, deltas: list[_Delta]) -> None:
        if text:
            self._said = True
            deltas.append(ReasoningDelta(text))

    def _go(self, place: _Place, held: str) -> bool:
        self._place, self._held = place, held
        return True


class ThinkFormat(ReasoningFormat):
    """Reasoning between tags; a chat template may write the first one into the prompt."""

    end = _CLOSE
    begin = _OPEN

    def is_open(self, prompt_end: str) -> bool:
        """Whether the prompt ends with <think>."""
        return prompt_end.rstrip().endswith(_OPEN)

    def parser(self, *, is_open: bool) -> ReasoningParser:
        """Return a parser; without <think> at the beginning, all is content."""
        return _ThinkParser(_Place.REASONING if is_open else _Place.START)
