"""The reasoning format `think`: the reasoning is between <think> and </think>, before the answer."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, TypeAlias

from graftlm.contracts import ContentDelta, ReasoningDelta, ReasoningFormat, ReasoningParser
from graftlm_chat.text_search import held_back

__all__ = ["ThinkFormat"]

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"
#: Maximum number of line ends between the reasoning and the answer that are not part of the answer.
_NUM_LINE_ENDS: Final = 2

_Delta: TypeAlias = ReasoningDelta | ContentDelta


class _State(Enum):
    START = auto()
    REASONING = auto()
    #: After the reasoning; line ends here are not content.
    AFTER = auto()
    CONTENT = auto()


class _ThinkParser(ReasoningParser):
    """Parses reasoning at the start of the text; later tags are content."""

    def __init__(self, state: _State) -> None:
        self._state = state
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
        if self._state is _State.REASONING:
            held = held.rstrip() if self._said else held.strip()
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(held)] if held and self._state is not _State.AFTER else []

    def _advance(self, deltas: list[_Delta]) -> bool:
        """Consume the part of the held text whose meaning is certain. Returns whether the state has changed."""
        match self._state:
            case _State.START:
                return self._open()
            case _State.REASONING:
                return self._reason(deltas)
            case _State.AFTER:
                # Other white space belongs to the answer, because a grammar may require it.
                rest = self._held[:_NUM_LINE_ENDS].lstrip("\n") + self._held[_NUM_LINE_ENDS:]
                return bool(rest) and self._enter(_State.CONTENT, rest)
        if self._held:
            deltas.append(ContentDelta(self._held))
            self._held = ""
        return False

    def _open(self) -> bool:
        start = self._held.lstrip()
        if start.startswith(_OPEN):
            return self._enter(_State.REASONING, start[len(_OPEN) :])
        return not _OPEN.startswith(start) and self._enter(_State.CONTENT, self._held)

    def _reason(self, deltas: list[_Delta]) -> bool:
        text, close, rest = self._held.partition(_CLOSE)
        # White space before and after the reasoning belongs to the template.
        text = text if self._said else text.lstrip()
        if close:
            self._say(text.rstrip(), deltas)
            return self._enter(_State.AFTER, rest)
        certain = text[: len(text) - held_back(text, _CLOSE)].rstrip()
        self._say(certain, deltas)
        self._held = text[len(certain) :]
        return False

    def _say(self, text: str, deltas: list[_Delta]) -> None:
        if text:
            self._said = True
            deltas.append(ReasoningDelta(text))

    def _enter(self, state: _State, held: str) -> bool:
        self._state, self._held = state, held
        return True


class ThinkFormat(ReasoningFormat):
    """Reasoning between tags. A chat template may write the opening tag at the end of the prompt."""

    end = _CLOSE
    begin = _OPEN

    def is_open(self, prompt_end: str) -> bool:
        """Return whether the prompt ends with <think>."""
        return prompt_end.rstrip().endswith(_OPEN)

    def parser(self, *, is_open: bool) -> ReasoningParser:
        """Return a parser for one completion.

        Args:
            is_open: whether the prompt ends with <think>. If not, all text is content unless it starts with <think>.
        """
        return _ThinkParser(_State.REASONING if is_open else _State.START)
