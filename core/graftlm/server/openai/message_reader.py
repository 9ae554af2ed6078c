"""Parsing of a completion's text into reasoning, content and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from graftlm.contracts import ContentDelta, MessageDelta, ReasoningDelta, ReasoningParser, ToolCallDelta
from graftlm.server.openai.answers import (
    AnswerMessage,
    CalledFunction,
    Delta,
    FunctionDelta,
    ToolCallBody,
    ToolCallPart,
)
from graftlm.server.openai.tools import ToolUse
from graftlm.types import FinishReason

__all__ = ["MessageReader"]


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: str = ""


class MessageReader:
    """Parses the text of one completion while it is generated, and collects the message."""

    def __init__(self, use: ToolUse | None, *, enforced: bool, reasoning: ReasoningParser | None) -> None:
        """Start with an empty message.

        Args:
            use: the tools whose calls are parsed. If None, calls remain in the content as text.
            enforced: passed to `ToolCallFormat.parser`.
            reasoning: parser of the reasoning. If None, the reasoning remains in the content.
        """
        self._use = use
        self._calls_parser = None if use is None else use.format.parser(use.tools, enforced=enforced)
        self._reasoning_parser = reasoning
        self._content = ""
        self._reasoning = ""
        self._calls: list[_Call] = []

    def push(self, text: str) -> list[Delta]:
        """Parse more text, and return the new parts of the message."""
        if self._reasoning_parser is None:
            return self._to_calls([ContentDelta(text)] if text else [])
        return self._to_calls(self._reasoning_parser.push(text))

    def finish(self, reason: FinishReason | None, matched_stop: str | int | None = None) -> list[Delta]:
        """End the text, and return the parts of the message that were held back.

        Args:
            reason: why the completion ended.
            matched_stop: the stop string or token id that ended the completion.
        """
        deltas = [] if self._reasoning_parser is None else self._to_calls(self._reasoning_parser.finish())
        if self._calls_parser is not None:
            is_complete = reason is FinishReason.STOP and not isinstance(matched_stop, str)
            deltas += self._added(self._calls_parser.finish() if is_complete else self._calls_parser.cut_off())
        return deltas

    def finish_name(self, reason: FinishReason | None, matched_stop: str | int | None = None) -> str | None:
        """Return OpenAI's name of a finish reason.

        The name is "tool_calls" if the answer has calls and was not cut off. If a stop string ended the answer, the
        name is "stop", because the last call may be incomplete.
        """
        if reason is FinishReason.STOP and self._calls and not isinstance(matched_stop, str):
            return "tool_calls"
        return None if reason is None else reason.value

    def message(self) -> AnswerMessage:
        """Return the message so far."""
        calls = [ToolCallBody(call.id, CalledFunction(call.name, call.arguments)) for call in self._calls]
        if self._reasoning_parser is None and not calls:
            return AnswerMessage("assistant", self._content)
        return AnswerMessage(
            "assistant",
            self._content or (None if calls or self._reasoning else ""),
            reasoning_content=self._reasoning or msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )

    def _to_calls(self, deltas: Sequence[ReasoningDelta | ContentDelta]) -> list[Delta]:
        """Parse the content deltas for tool calls, and add all deltas to the message."""
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta) and self._calls_parser is not None:
                found += self._added(self._calls_parser.push(delta.text))
            else:
                found.append(self._add(delta))
        return found

    def _added(self, deltas: Sequence[MessageDelta]) -> list[Delta]:
        """Add deltas to the message. If only one call is allowed, later calls are dropped."""
        one_call = self._use is not None and not self._use.parallel
        return [self._add(one) for one in deltas if not (one_call and isinstance(one, ToolCallDelta) and one.index)]

    def _add(self, delta: ReasoningDelta | ContentDelta | ToolCallDelta) -> Delta:
        """Add a delta to the message, and return it in OpenAI's format."""
        match delta:
            case ContentDelta(text):
                self._content += text
                return Delta(content=text)
            case ReasoningDelta(text):
                self._reasoning += text
                return Delta(reasoning_content=text)
            case ToolCallDelta(index, None, arguments):
                self._calls[index].arguments += arguments
                return Delta(tool_calls=[ToolCallPart(index, function=FunctionDelta(arguments=arguments))])
            case ToolCallDelta(index, name, arguments):
                call = _Call(self._new_id(), str(name), arguments)
                self._calls.append(call)
                function = FunctionDelta(name=name, arguments=arguments)
                return Delta(tool_calls=[ToolCallPart(index, id=call.id, type="function", function=function)])

    def _new_id(self) -> str:
        return "" if self._use is None else self._use.format.new_id()
