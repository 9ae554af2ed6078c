"""The conformance kits of chat formats."""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from graftlm.contracts import (
    ChatFormatContext,
    ContentDelta,
    ReasoningDelta,
    ReasoningFormat,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallFormat,
    ToolChoice,
)
from graftlm.testing.conformance import Conformance

__all__ = ["ReasoningFormatConformance", "ToolCallFormatConformance"]

_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOLS: Final = (Tool("f", "Does f.", _SCHEMA), Tool("get_weather", "Tells the weather.", {"type": "object"}))
_CALLS: Final = (
    ToolCall("f", '{"a": 1}'),
    ToolCall("get_weather", "{}"),
    ToolCall("get_weather", '{"city": "Zürich \\"]}</tool_call>; \\n", "days": [1, -2.5, true, null, {"x y": "🙂"}]}'),
)
_PIECES: Final = (
    *(
        "<",
        ">",
        "/",
        "tool_call",
        "<tool_call>",
        "</tool_call>",
        "[",
        "]",
        "{",
        "}",
        '"',
        "'",
        "\\",
        ",",
        ";",
        ":",
        "=",
    ),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f"', "[f(a=1)]", "f(", ")", "[TOOL_CALLS]", "<|python_tag|>"),
    *(" ", "\n", "name", "think", "<think>", "</think>", "Hello", "ß", "🙂", "1e999", "NaN", "\x00", "\u2028"),
)


class ToolCallFormatConformance(Conformance, ABC):
    """The kit for the contracts `ToolCallFormat` and `ToolCallParser`.

    class TestMyFormat(ToolCallFormatConformance):
        def create(self, context):
            return MyFormat()
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"enforced": (False, True), "seed": range(20)}

    @abstractmethod
    def create(self, context: ChatFormatContext) -> ToolCallFormat:
        """Return a new format."""

    def test_what_render_writes_is_read_as_the_same_calls(self, enforced: bool, seed: int) -> None:
        """A parser returns the calls that `render` has written."""
        draw = random.Random(seed)
        calls = draw.choices(_CALLS, k=draw.randint(1, 4))
        text = self._format.render(calls)
        content, read = self._read(_cut(text, draw), enforced)
        expected = [(call.name, call.values()) for call in calls]
        assert [(name, json.loads(arguments)) for name, arguments in read] == expected, f"for {text!r}: {read}"
        assert content == "", f"for {text!r}, the parser returned the content {content!r}"

    def test_pieces_change_nothing(self, enforced: bool, seed: int) -> None:
        """Content and calls do not depend on how the text is cut into pieces; no text raises."""
        draw = random.Random(seed)
        for _ in range(25):
            text = "".join(draw.choices([*_PIECES, self._format.render(_CALLS[:1])], k=draw.randint(0, 12)))
            whole = self._read([text], enforced)
            for pieces in (list(text), list(_cut(text, draw))):
                assert self._read(pieces, enforced) == whole, f"the result for {text!r} differs for pieces {pieces}"

    def test_text_comes_back_unchanged(self, enforced: bool, seed: int) -> None:
        """Text without a call is returned unchanged as content."""
        draw = random.Random(seed)
        for _ in range(25):
            text = "".join(draw.choices(_PIECES, k=draw.randint(0, 8)))
            content, calls = self._read([text], enforced)
            assert calls or content == text, f"the content of {text!r} is {content!r}"

    def test_an_unknown_tool_is_content(self, enforced: bool, seed: int) -> None:
        """A call of an unknown tool is content."""
        text = self._format.render([ToolCall("unknown", '{"a": 1}')])
        assert self._read(_cut(text, random.Random(seed)), enforced) == (text, [])

    def test_a_beginning_that_is_cut_off_is_left_out(self, enforced: bool, seed: int) -> None:
        """`cut_off` drops text that may be the start of a call, including its markup."""
        draw = random.Random(seed)
        calls = draw.choices(_CALLS, k=2)
        text = self._format.render(calls)
        whole = [(call.name, call.values()) for call in calls]
        for end in draw.sample(range(len(text)), k=12):
            content, read = self._read(_cut(text[:end], draw), enforced, is_cut=True)
            assert content == "", f"for {text[:end]!r}, the parser returned the content {content!r}"
            assert [name for name, _ in read] == [name for name, _ in whole[: len(read)]], f"for {text[:end]!r}: {read}"

    def test_text_that_is_cut_off_is_content(self, enforced: bool) -> None:
        """`cut_off` returns held text that is not the start of a call."""
        for text in ("Hello ", '{"city": "Zürich", "da', "[1, 2", "[unknown(", "a [f", " ", '{"name": "Zü'):
            assert self._read([text], enforced, is_cut=True) == (text, []), f"{text!r} is not the start of a call"

    def test_only_auto_goes_without_a_grammar(self) -> None:
        """`grammar` returns a specification for `REQUIRED`; it is strict if all tools are strict."""
        for parallel in (False, True):
            grammar = self._format.grammar(_TOOLS, ToolChoice.REQUIRED, parallel=parallel)
            assert grammar is not None, f"grammar() returned None for required calls, parallel={parallel}"
            assert len(grammar.places) in (0, len(_TOOLS)), f"places for {len(_TOOLS)} tools: {grammar.places}"
        strict = [Tool("f", "", _SCHEMA | {"additionalProperties": False}, strict=True)]
        for tools, is_strict in ((strict, True), ([*strict, _TOOLS[1]], False)):
            grammar = self._format.grammar(tools, ToolChoice.REQUIRED, parallel=False)
            assert grammar is not None
            assert grammar.spec.strict == is_strict, f"for {tools}, the grammar's strict is {grammar.spec.strict}"

    def test_ids_differ(self) -> None:
        """`new_id` returns a different id for each call."""
        assert len({self._format.new_id() for _ in range(100)}) == 100, "ids repeat"

    def test_instructions_name_every_tool(self) -> None:
        """`instructions` contains the name and the description of each tool."""
        text = self._format.instructions(_TOOLS)
        assert all(tool.name in text and tool.description in text for tool in _TOOLS), text

    @property
    def _format(self) -> ToolCallFormat:
        return self.create(ChatFormatContext())

    def _read(
        self, pieces: Iterator[str] | Sequence[str], enforced: bool, is_cut: bool = False
    ) -> tuple[str, list[tuple[str, str]]]:
        """Parse the pieces of a text; return (content, list of (name, arguments) of the calls)."""
        parser = self._format.parser(_TOOLS, enforced=enforced)
        deltas = [delta for piece in pieces for delta in parser.push(piece)]
        content, calls = "", list[tuple[str, str]]()
        for delta in [*deltas, *(parser.cut_off() if is_cut else parser.finish())]:
            match delta:
                case ContentDelta(text):
                    content += text
                case ToolCallDelta(index, None, arguments):
                    assert index == len(calls) - 1, f"call {index} continues after the start of call {len(calls) - 1}"
                    calls[-1] = (calls[-1][0], calls[-1][1] + arguments)
                case ToolCallDelta(index, str(name), arguments):
                    assert index == len(calls), f"call {index} starts after {len(calls)} calls"
                    calls.append((name, arguments))
        return content, calls


class ReasoningFormatConformance(Conformance, ABC):
    """The kit for the contracts `ReasoningFormat` and `ReasoningParser`."""

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"is_open": (False, True), "seed": range(20)}

    @abstractmethod
    def create(self, context: ChatFormatContext) -> ReasoningFormat:
        """Return a new format."""

    def test_pieces_change_nothing(self, is_open: bool, seed: int) -> None:
        """Reasoning and content do not depend on how the text is cut into pieces; no text raises."""
        draw = random.Random(seed)
        for _ in range(25):
            text = "".join(draw.choices(_PIECES, k=draw.randint(0, 12)))
            whole = self._read([text], is_open)
            for pieces in (list(text), list(_cut(text, draw))):
                assert self._read(pieces, is_open) == whole, f"the result for {text!r} differs for pieces {pieces}"

    def test_an_answer_without_reasoning_is_content(self, seed: int) -> None:
        """An answer without reasoning is content."""
        text = "".join(random.Random(seed).choices(("a ", "b\n", "{}", "<", "1"), k=8))
        assert self._read([text], False) == ("", text)

    def test_the_end_ends_the_reasoning(self) -> None:
        """The text `end` ends the reasoning."""
        reasoning = self.create(ChatFormatContext())
        if reasoning.end:
            assert self._read(["So", reasoning.end, "yes"], True) == ("So", "yes")
        if reasoning.end and reasoning.begin:
            assert self._read([reasoning.begin, "So", reasoning.end, "yes"], False) == ("So", "yes")

    def test_two_line_ends_after_the_reasoning_are_neither(self) -> None:
        """Up to two line ends after the reasoning are neither reasoning nor content."""
        reasoning = self.create(ChatFormatContext())
        for num in range(4 if reasoning.end else 0):
            answer = "\n" * max(0, num - 2) + " yes"
            text = f"So{reasoning.end}" + "\n" * num + " yes"
            for pieces in ([text], list(text)):
                assert self._read(pieces, True) == ("So", answer), f"{num} line ends before the answer"

    def test_a_prompt_without_reasoning_leaves_nothing_open(self) -> None:
        """`is_open` is false for a prompt that does not open a reasoning, or that ends after the reasoning's end."""
        reasoning = self.create(ChatFormatContext())
        for prompt_end in ("", "What is 2 + 2?\n", f"So{reasoning.end}\n\n"):
            assert not reasoning.is_open(prompt_end), f"{prompt_end!r} leaves the reasoning open"

    def _read(self, pieces: Iterator[str] | Sequence[str], is_open: bool) -> tuple[str, str]:
        parser = self.create(ChatFormatContext()).parser(is_open=is_open)
        deltas = [delta for piece in pieces for delta in parser.push(piece)]
        reasoning = content = ""
        for delta in [*deltas, *parser.finish()]:
            if isinstance(delta, ReasoningDelta):
                reasoning += delta.text
            else:
                content += delta.text
        return reasoning, content


def _cut(text: str, draw: random.Random) -> Iterator[str]:
    """Cut a text into pieces of a few characters, and yield them."""
    at = 0
    while at < len(text):
        size = draw.randint(1, 5)
        yield text[at : at + size]
        at += size
