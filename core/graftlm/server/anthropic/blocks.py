"""Converts the deltas of a chat answer to Anthropic's content blocks."""

import hashlib
import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import msgspec

from graftlm.server.anthropic.answers import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputDelta,
    SignatureDelta,
    TextBlockBody,
    TextDelta,
    ThinkingBlockBody,
    ThinkingDelta,
    ToolUseBody,
)
from graftlm.server.openai.answers import AnswerMessage, Delta, ToolCallPart

__all__ = ["BlockWriter", "ThinkingDisplay", "blocks_of"]

_SIGNATURE_LEN: Final = 32


class ThinkingDisplay(Enum):
    """How much of the reasoning an answer shows."""

    TEXT = "blocks with their text"
    OMITTED = "blocks without text"
    NONE = "no blocks"


def blocks_of(message: AnswerMessage, display: ThinkingDisplay) -> list[ContentBlock]:
    """Return the blocks of a complete answer."""
    blocks: list[ContentBlock] = []
    reasoning = message.reasoning_content
    if isinstance(reasoning, str) and reasoning and display is not ThinkingDisplay.NONE:
        blocks.append(_thinking(reasoning, display))
    if message.content:
        blocks.append(TextBlockBody(message.content))
    calls = message.tool_calls
    if calls is not None and calls is not msgspec.UNSET:
        blocks += [ToolUseBody(call.id, call.function.name, _input_of(call.function.arguments)) for call in calls]
    return blocks


class BlockWriter:
    """Writes the block events of one streamed answer."""

    def __init__(self, display: ThinkingDisplay) -> None:
        self._display = display
        self._index = -1
        # kind of delta that the open block contains; None if no block is open
        self._open: type[TextDelta | ThinkingDelta | InputDelta] | None = None
        self._thoughts = ""

    def add(self, delta: Delta) -> Iterator[BlockStart | BlockDelta | BlockStop]:
        """Yield the events of a delta."""
        if delta.reasoning_content and self._display is not ThinkingDisplay.NONE:
            yield from self._think(delta.reasoning_content)
        if delta.content:
            if self._open is not TextDelta:
                yield from self._start(TextDelta, TextBlockBody(""))
            yield BlockDelta(self._index, TextDelta(delta.content))
        for part in delta.tool_calls or ():
            yield from self._call(part)

    def end(self) -> Iterator[BlockDelta | BlockStop]:
        """Yield the events that close the open block."""
        if self._open is ThinkingDelta:
            yield BlockDelta(self._index, SignatureDelta(_signature(self._thoughts)))
        if self._open is not None:
            yield BlockStop(self._index)
        self._open = None

    def _think(self, text: str) -> Iterator[BlockStart | BlockDelta | BlockStop]:
        if self._open is not ThinkingDelta:
            self._thoughts = ""
            yield from self._start(ThinkingDelta, ThinkingBlockBody("", ""))
        self._thoughts += text
        if self._display is ThinkingDisplay.TEXT:
            yield BlockDelta(self._index, ThinkingDelta(text))

    def _call(self, part: ToolCallPart) -> Iterator[BlockStart | BlockDelta | BlockStop]:
        function = part.function
        if part.id is not None:
            name = function.name if function is not None and function.name is not None else ""
            yield from self._start(InputDelta, ToolUseBody(part.id, name, {}))
        if function is not None and function.arguments:
            yield BlockDelta(self._index, InputDelta(function.arguments))

    def _start(
        self, kind: type[TextDelta | ThinkingDelta | InputDelta], block: ContentBlock
    ) -> Iterator[BlockStart | BlockDelta | BlockStop]:
        yield from self.end()
        self._index += 1
        self._open = kind
        yield BlockStart(self._index, block)


def _thinking(reasoning: str, display: ThinkingDisplay) -> ThinkingBlockBody:
    return ThinkingBlockBody("" if display is ThinkingDisplay.OMITTED else reasoning, _signature(reasoning))


def _signature(reasoning: str) -> str:
    return hashlib.sha256(reasoning.encode("utf-8", "surrogatepass")).hexdigest()[:_SIGNATURE_LEN]


def _input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object.

    Text that is not a JSON object, such as text cut off by `max_tokens`, is returned under the key `arguments`.
    """
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}
