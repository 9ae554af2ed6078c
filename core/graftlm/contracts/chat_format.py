"""The contracts of chat formats, which define how a model writes tool calls and reasoning into its text."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from graftlm.contracts.grammar import GrammarSpec

__all__ = [
    "CallGrammar",
    "ChatFormatCapabilities",
    "ChatFormatContext",
    "ContentDelta",
    "MessageDelta",
    "ReasoningDelta",
    "ReasoningFormat",
    "ReasoningParser",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallFormat",
    "ToolCallParser",
    "ToolChoice",
]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: ASCII letters, digits, `_`, `-`; unique among a request's tools.
        parameters: a JSON schema of the arguments, which are an object.
        strict: whether a request is refused if this schema cannot be enforced in full.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model generated.

    Attributes:
        arguments: the text of a JSON object.
    """

    name: str
    arguments: str

    def values(self) -> dict[str, Any]:
        """Return the arguments by name.

        Raises:
            ValueError: `arguments` is not the text of a JSON object.
        """
        values = json.loads(self.arguments)
        if not isinstance(values, dict):
            raise ValueError(f"arguments must be a JSON object, got {self.arguments[:80]!r}")
        return values


class ToolChoice(str, Enum):
    """The request's rule for tool calls."""

    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that is appended to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text that is appended to the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part that is appended to a tool call.

    Attributes:
        index: index of the call in the message, counted from 0.
        name: the tool's name in a call's first delta; None in later deltas.
        arguments: text that is appended to the call's arguments, a JSON object.
    """

    index: int
    name: str | None
    arguments: str


MessageDelta: TypeAlias = ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ChatFormatCapabilities:
    """The properties by which the format of a checkpoint is selected automatically.

    Attributes:
        template_markers: texts that identify the format. It is selected if the model's chat template contains one of
            them.
    """

    template_markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatFormatContext:
    """The arguments of a format's `create`.

    Attributes:
        chat_template: the checkpoint's Jinja template; "" if it has none.
    """

    chat_template: str = ""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar that enforces a tool call format.

    Attributes:
        spec: the specification of all tools. It is strict if all of them are. Otherwise `GrammarBackend.check` returns
            the keywords that are not enforced, and some of these may belong to a strict tool. The caller finds the tool
            of each keyword with `left_out`, and refuses the request if the tool is strict.
        places: path of each tool's schema in the specification, in the notation of `check`, such as
            `$.structures[0].schema`. Empty if the specification contains no schema.
        unenforced: keywords that the format does not enforce, as pairs (index of the tool, path of the keyword in the
            tool's schema, such as `$.properties.a.minimum`). They do not belong to strict tools.
    """

    spec: GrammarSpec
    places: tuple[str, ...] = ()
    unenforced: tuple[tuple[int, str], ...] = ()

    def left_out(self, paths: Sequence[str]) -> list[tuple[int, str]]:
        """Return all keywords that are not enforced, in the form of `unenforced`.

        Args:
            paths: the result of `GrammarBackend.check` for the specification.

        Raises:
            ValueError: a path is not in the schema of any tool.
        """
        return [*self.unenforced, *map(self._in_schema, paths)]

    def _in_schema(self, path: str) -> tuple[int, str]:
        for i, place in enumerate(self.places):
            if path.startswith(place) and path[len(place) :][:1] in ("", ".", "["):
                return i, "$" + path[len(place) :]
        raise ValueError(
            f"{path} is not inside a tool's schema; the schemas are at {', '.join(self.places) or 'no path'}"
        )


class ToolCallParser(ABC):
    """Parses one completion's text while it is generated. It is not used by two threads at the same time.

    Invariants:
        - No method raises. Text that is not a call of a known tool is content.
        - The joined content and calls do not depend on how the text is cut into pieces.
        - Text without a call is returned unchanged. White space next to a call may be dropped.
        - Calls are numbered from 0, in order. A call ends before the next call begins.
    """

    @abstractmethod
    def push(self, text: str) -> Sequence[MessageDelta]:
        """Parse more text. Returns: the final deltas, which later text cannot change."""

    @abstractmethod
    def finish(self) -> Sequence[MessageDelta]:
        """End the text. Returns: the deltas that were held back. `push` must not be called afterwards."""

    def cut_off(self) -> Sequence[MessageDelta]:
        """End the parsing of a text that a limit cut off, such as the maximum number of tokens.

        It works like `finish`, but drops text that was held back because a call or its markup may have started. A
        parser that holds back no such text need not override this method.
        """
        return self.finish()


class ToolCallFormat(ABC):
    """The format in which a family of models writes tool calls.

    Special tokens are not part of the text: grammars do not allow them, and detokenization drops them. If a marker of a
    format is a special token, the format therefore must not wait for the marker or enforce it.

    Invariants:
        - A parser returns the calls of the text that `render` wrote.
        - A parser returns calls of the given tools for every text that the grammar of `grammar` allows.
    """

    @abstractmethod
    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser for one completion.

        Args:
            enforced: whether the grammar of `grammar` enforces the format.
                If True, text that starts like a call is always a call, so its arguments may be returned while they are
                generated. If the text ends inside a call, the generated part of the call is returned. If False, a call
                is returned only when it is complete and well-formed. A truncated call is content.
        """

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar | None:
        """Return the grammar that enforces the format.

        Args:
            tools: the request's tools, at least one.
            choice: with `AUTO`, only calls are constrained, not other text; with `REQUIRED`, the output begins with a
                call.
            parallel: whether the output may contain more than one call.

        Returns: the grammar. None if calls cannot be distinguished from text before they are complete; None is allowed
            only for `AUTO`.

        Raises:
            GrammarError: this format cannot enforce the schema of a strict tool.
        """

    @abstractmethod
    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as text in this format, for chat templates that do not support tool calls."""

    @abstractmethod
    def instructions(self, tools: Sequence[Tool]) -> str:
        """Return a prompt that describes the tools and this format, for chat templates that do not describe them."""

    def new_id(self) -> str:
        """Return a new random id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"


class ReasoningParser(ABC):
    """Splits one completion's text into reasoning and content. It is not used by two threads at the same time.

    Invariants:
        - The invariants of `ToolCallParser` hold. Text that is not reasoning is content.
        - Up to two line breaks after the end of the reasoning are dropped. A grammar of the
          answer begins after these line breaks.
    """

    @abstractmethod
    def push(self, text: str) -> Sequence[ReasoningDelta | ContentDelta]:
        """Parse more text. Returns: the final deltas, which later text cannot change."""

    @abstractmethod
    def finish(self) -> Sequence[ReasoningDelta | ContentDelta]:
        """End the text. Returns: the deltas that were held back. `push` must not be called afterwards."""


class ReasoningFormat(ABC):
    """The format in which a family of models marks its reasoning.

    Invariants:
        - Reasoning ends at the first `end`.
        - The output begins inside the reasoning only if the prompt starts reasoning at its end and does not end it.

    Attributes:
        end: the text that ends the reasoning, at most 32 characters; "" if the model does not reason.
        begin: the text with which the model begins its reasoning; "" if only prompts begin reasoning. If the text is a
            single token, a grammar allows the output to start with reasoning or with the answer.
    """

    end: str
    begin: str = ""

    @abstractmethod
    def is_open(self, prompt_end: str) -> bool:
        """Return whether the output after a prompt begins inside the reasoning.

        Args:
            prompt_end: the last characters of the prompt, including special tokens.
        """

    @abstractmethod
    def parser(self, *, is_open: bool) -> ReasoningParser:
        """Return a parser for one completion.

        Args:
            is_open: whether the output begins inside the reasoning.
        """
