"""Converts the deltas of a chat answer to the output items of a response and their events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from graftlm.server.openai.answers import ContentToken, Delta, ToolCallPart, new_item_id
from graftlm.server.openai.responses.answers import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    ItemAdded,
    ItemDone,
    MessageItemBody,
    OutputItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningItem,
    ReasoningTextDelta,
    ReasoningTextDone,
    ReasoningTextPart,
    ResponseEvent,
    TextDelta,
    TextDone,
)

__all__ = ["ItemWriter"]


@dataclass(slots=True)
class _OpenText:
    id: str
    text: str = ""
    logprobs: list[ContentToken] = field(default_factory=list)

    def part(self) -> OutputText:
        return OutputText(self.text, logprobs=tuple(self.logprobs))

    def item(self, status: str) -> MessageItemBody:
        return MessageItemBody(id=self.id, status=status, content=(self.part(),))


@dataclass(slots=True)
class _OpenReasoning:
    id: str
    text: str = ""

    def part(self) -> ReasoningTextPart:
        return ReasoningTextPart(self.text)

    def item(self, status: str) -> ReasoningItem:
        return ReasoningItem(id=self.id, status=status, content=(self.part(),))


@dataclass(slots=True)
class _OpenCall:
    id: str
    call_id: str
    name: str
    text: str = ""

    def item(self, status: str) -> CallItem:
        return CallItem(id=self.id, call_id=self.call_id, name=self.name, arguments=self.text, status=status)


_Open: TypeAlias = _OpenText | _OpenReasoning | _OpenCall


class ItemWriter:
    """Writes the items of one response, one after another.

    Attributes:
        items: the completed items.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: _Open | None = None
        self._next_number = 0

    def number(self) -> int:
        """Return the sequence number of the next event."""
        self._next_number += 1
        return self._next_number - 1

    def add(self, delta: Delta, logprobs: Sequence[ContentToken] = ()) -> Iterator[ResponseEvent]:
        """Yield the events of a delta; the caller must exhaust the iterator."""
        if delta.reasoning_content:
            yield from self._reason(delta.reasoning_content)
        if delta.content:
            yield from self._say(delta.content, logprobs)
        for part in delta.tool_calls or ():
            yield from self._call(part)

    def end(self, status: str = "completed") -> Iterator[ResponseEvent]:
        """Yield the events that complete the open item with `status`; the caller must exhaust the iterator."""
        item, index = self._open, len(self.items)
        match item:
            case _OpenText():
                logprobs = tuple(item.logprobs)
                yield TextDone(self.number(), item.id, index, item.text, logprobs)
                yield PartDone(self.number(), item.id, index, item.part())
            case _OpenReasoning():
                yield ReasoningTextDone(self.number(), item.id, index, item.text)
                yield PartDone(self.number(), item.id, index, item.part())
            case _OpenCall():
                yield ArgumentsDone(self.number(), item.id, index, item.name, item.text)
        if item is not None:
            self._open = None
            done = item.item(status)
            self.items.append(done)
            yield ItemDone(self.number(), index, done)

    def _reason(self, text: str) -> Iterator[ResponseEvent]:
        item = self._open
        if not isinstance(item, _OpenReasoning):
            item = _OpenReasoning(new_item_id("rs"))
            yield from self._start(item, ReasoningItem(id=item.id, status="in_progress", content=()))
            yield PartAdded(self.number(), item.id, len(self.items), ReasoningTextPart(""))
        item.text += text
        yield ReasoningTextDelta(self.number(), item.id, len(self.items), text)

    def _say(self, text: str, logprobs: Sequence[ContentToken]) -> Iterator[ResponseEvent]:
        item = self._open
        if not isinstance(item, _OpenText):
            item = _OpenText(new_item_id("msg"))
            yield from self._start(item, MessageItemBody(id=item.id, status="in_progress", content=()))
            yield PartAdded(self.number(), item.id, len(self.items), OutputText(""))
        item.text += text
        item.logprobs += logprobs
        yield TextDelta(self.number(), item.id, len(self.items), text, tuple(logprobs))

    def _call(self, part: ToolCallPart) -> Iterator[ResponseEvent]:
        function = part.function
        if part.id is not None:
            name = function.name if function is not None and function.name is not None else ""
            call = _OpenCall(new_item_id("fc"), part.id, name)
            yield from self._start(call, call.item("in_progress"))
        if function is not None and function.arguments and isinstance(self._open, _OpenCall):
            self._open.text += function.arguments
            yield ArgumentsDelta(self.number(), self._open.id, len(self.items), function.arguments)

    def _start(self, item: _Open, body: OutputItem) -> Iterator[ResponseEvent]:
        yield from self.end()
        self._open = item
        yield ItemAdded(self.number(), len(self.items), body)
