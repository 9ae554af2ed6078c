"""The parser of calls that are JSON objects in some markup."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from graftlm.contracts import MessageDelta, Tool, ToolCallParser
from graftlm_chat.call_reader import CallReader
from graftlm_chat.markup import Markup, Outcome, Word, match_words
from graftlm_chat.message_builder import MessageBuilder
from graftlm_chat.text_search import held_back

__all__ = ["JsonCallParser"]

_BRACE: Final = Word("{")


class _Place(Enum):
    #: Nothing was said yet, and calls need no marker.
    START = auto()
    TEXT = auto()
    #: At a marker.
    OPENING = auto()
    CALL = auto()
    AFTER_CALL = auto()


class JsonCallParser(ToolCallParser):
    """Finds the markup, and has a `CallReader` read what is in it.

    START --> OPENING or TEXT      TEXT --marker--> OPENING      OPENING --{--> CALL --> AFTER_CALL
    AFTER_CALL --separator {--> CALL      AFTER_CALL --closing--> TEXT      all else --> TEXT
    """

    def __init__(self, markup: Markup, tools: Sequence[Tool], *, enforced: bool) -> None:
        self._markup = markup
        self._names = frozenset(tool.name for tool in tools)
        self._enforced = enforced
        self._message = MessageBuilder()
        self._place = _Place.START if markup.is_bare else _Place.TEXT
        self._held = ""
        self._before_call = ""  # read before the call's brace; content again should there be no call
        self._reader = CallReader(self._names, enforced=enforced)
        self._has_begun = False

    def push(self, text: str) -> Sequence[MessageDelta]:
        """Take in more text; returns what is certain by now."""
        self._held += text
        while self._advance():
            pass
        return self._message.take()

    def finish(self) -> Sequence[MessageDelta]:
        """Take in the end; a call cut short is told as far as it goes if it had begun, else it is content."""
        if self._place is _Place.CALL and not self._has_begun:
            self._message.content(self._before_call + self._reader.text)
        elif self._place in (_Place.START, _Place.TEXT, _Place.OPENING):
            self._message.content(self._held)
        return self._message.end()

    def cut_off(self) -> Sequence[MessageDelta]:
        """Take in the end; what may be the beginning of a call is left out, and what has a marker is."""
        if self._place is _Place.CALL and not self._has_begun:
            if self._markup.marker not in self._before_call and not self._reader.may_be_call():
                self._message.content(self._before_call + self._reader.text)
        elif self._place is _Place.START and not self._held.strip():
            self._message.content(self._held)
        return self._message.end()

    def _advance(self) -> bool:
        """Take what is certain out of what is held; returns whether another place has been reached."""
        match self._place:
            case _Place.START:
                return self._open(Word(self._markup.marker, is_optional=True))
            case _Place.TEXT:
                return self._find_marker()
            case _Place.OPENING:
                return self._open(Word(self._markup.marker))
            case _Place.CALL:
                return self._read_call()
            case _Place.AFTER_CALL:
                return self._go_on()

    def _open(self, marker: Word) -> bool:
        outcome, end = match_words(self._held, (marker, *self._markup.opening, _BRACE))
        if outcome is Outcome.YES:
            return self._begin_call(end)
        if outcome is Outcome.OPEN:
            return False
        if not marker.is_optional:  # it is no marker, after all
            self._message.content(marker.text)
            self._held = self._held[len(marker.text) :]
        return self._go(_Place.TEXT)

    def _find_marker(self) -> bool:
        marker = self._markup.marker
        at = self._held.find(marker)
        if at >= 0:
            self._message.content(self._held[:at])
            self._held = self._held[at:]
            return self._go(_Place.OPENING)
        certain = len(self._held) - held_back(self._held, marker)
        self._message.content(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _begin_call(self, after_brace: int) -> bool:
        self._before_call, self._held = self._held[: after_brace - 1], self._held[after_brace - 1 :]
        self._reader = CallReader(self._names, enforced=self._enforced)
        self._has_begun = False
        return self._go(_Place.CALL)

    def _read_call(self) -> bool:
        rest = self._reader.push(self._held)
        self._held = rest or ""
        name = self._reader.begun
        if name is not None:
            if not self._has_begun:
                self._has_begun = True
                self._message.call(name)
            self._message.arguments(self._reader.arguments())
        if rest is None:
            return False
        if name is not None:
            return self._go(_Place.AFTER_CALL)
        self._message.content(self._before_call + self._reader.text)
        return self._go(_Place.TEXT)

    def _go_on(self) -> bool:
        outcomes = []
        if self._markup.separator is not None:
            outcome, end = match_words(self._held, (*self._markup.separator, _BRACE))
            if outcome is Outcome.YES:
                return self._begin_call(end)
            outcomes.append(outcome)
        if self._markup.closing:
            outcome, end = match_words(self._held, self._markup.closing)
            if outcome is Outcome.YES:
                self._held = self._held[end:]
                return self._go(_Place.TEXT)
            outcomes.append(outcome)
        return Outcome.OPEN not in outcomes and self._go(_Place.TEXT)

    def _go(self, place: _Place) -> bool:
        self._place = place
        return True
