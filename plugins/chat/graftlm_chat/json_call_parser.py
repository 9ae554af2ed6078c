"""The parser of calls that are JSON objects with markup around them."""

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


class _State(Enum):
    #: No text has arrived, and the marker is optional.
    START = auto()
    TEXT = auto()
    #: The held text starts at a marker.
    OPENING = auto()
    CALL = auto()
    AFTER_CALL = auto()


class JsonCallParser(ToolCallParser):
    """Finds the markup of calls, and reads the objects in it with a `CallReader`.

    START --> OPENING or TEXT      TEXT --marker--> OPENING      OPENING --{--> CALL --> AFTER_CALL
    AFTER_CALL --separator {--> CALL      AFTER_CALL --closing--> TEXT      otherwise --> TEXT

    Args:
        markup: the text around the objects.
        tools: the tools that may be called.
        enforced: whether a grammar enforces calls; see `CallReader`.
    """

    def __init__(self, markup: Markup, tools: Sequence[Tool], *, enforced: bool) -> None:
        self._markup = markup
        self._names = frozenset(tool.name for tool in tools)
        self._enforced = enforced
        self._message = MessageBuilder()
        self._state = _State.START if markup.is_bare else _State.TEXT
        self._held = ""
        self._before_call = ""  # markup before the object's brace; it becomes content if the object is not a call
        self._reader = CallReader(self._names, enforced=enforced)
        self._has_begun = False

    def push(self, text: str) -> Sequence[MessageDelta]:
        """Parse more text. Returns the deltas that are certain now."""
        self._held += text
        while self._advance():
            pass
        return self._message.take()

    def finish(self) -> Sequence[MessageDelta]:
        """Parse the end of the text.

        Returns: the remaining deltas. If the name of an incomplete call was returned before, the call ends here.
        Otherwise the text of the incomplete call is content.
        """
        if self._state is _State.CALL and not self._has_begun:
            self._message.content(self._before_call + self._reader.text)
        elif self._state in (_State.START, _State.TEXT, _State.OPENING):
            self._message.content(self._held)
        return self._message.end()

    def cut_off(self) -> Sequence[MessageDelta]:
        """Parse the end of a truncated text.

        Returns: the remaining deltas, without text that follows a marker or may be the start of a call.
        """
        if self._state is _State.CALL and not self._has_begun:
            if self._markup.marker not in self._before_call and not self._reader.may_be_call():
                self._message.content(self._before_call + self._reader.text)
        elif self._state is _State.START and not self._held.strip():
            self._message.content(self._held)
        return self._message.end()

    def _advance(self) -> bool:
        """Consume the part of the held text whose meaning is certain. Returns whether the state has changed."""
        match self._state:
            case _State.START:
                return self._open(Word(self._markup.marker, is_optional=True))
            case _State.TEXT:
                return self._find_marker()
            case _State.OPENING:
                return self._open(Word(self._markup.marker))
            case _State.CALL:
                return self._read_call()
            case _State.AFTER_CALL:
                return self._read_after_call()

    def _open(self, marker: Word) -> bool:
        outcome, end = match_words(self._held, (marker, *self._markup.opening, _BRACE))
        if outcome is Outcome.YES:
            return self._begin_call(end)
        if outcome is Outcome.OPEN:
            return False
        if not marker.is_optional:  # the held text starts with the marker, but no call follows: the marker is content
            self._message.content(marker.text)
            self._held = self._held[len(marker.text) :]
        return self._enter(_State.TEXT)

    def _find_marker(self) -> bool:
        marker = self._markup.marker
        at = self._held.find(marker)
        if at >= 0:
            self._message.content(self._held[:at])
            self._held = self._held[at:]
            return self._enter(_State.OPENING)
        certain = len(self._held) - held_back(self._held, marker)
        self._message.content(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _begin_call(self, after_brace: int) -> bool:
        self._before_call, self._held = self._held[: after_brace - 1], self._held[after_brace - 1 :]
        self._reader = CallReader(self._names, enforced=self._enforced)
        self._has_begun = False
        return self._enter(_State.CALL)

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
            return self._enter(_State.AFTER_CALL)
        self._message.content(self._before_call + self._reader.text)
        return self._enter(_State.TEXT)

    def _read_after_call(self) -> bool:
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
                return self._enter(_State.TEXT)
            outcomes.append(outcome)
        return Outcome.OPEN not in outcomes and self._enter(_State.TEXT)

    def _enter(self, state: _State) -> bool:
        self._state = state
        return True
