"""The contracts of chat formats: how a model writes tool calls and reasoning into its text."""

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
        strict: the schema is enforced in full, or the request refused.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote.

    Attributes:
        arguments: the text of a JSON object.
    """

    name: str
    arguments: str

    def values(self) -> dict[str, Any]:
        """Return the arguments by name.

        Raises:
            ValueError: they are not the text of a JSON object.
        """
        values = json.loads(self.arguments)
        if not isinstance(values, dict):
            raise ValueError(f"arguments must be a JSON object, got {self.arguments[:80]!r}")
        return values


class ToolChoice(str, Enum):
    """Whether the model may call tools, and whether it has to."""

    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what the user is to read."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a tool call.

    Attributes:
        index: of the call in the message, from 0.
        name: on a call's first delta; None on those that follow.
        arguments: more of the text of a JSON object.
    """

    index: int
    name: str | None
    arguments: str


MessageDelta: TypeAlias = ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ChatFormatCapabilities:
    """What the choice of a format by its checkpoint asks.

    Attributes:
        template_markers: texts of which a chat template holds one when its model was trained on the format.
    """

    template_markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatFormatContext:
    """What a format is created with.

    Attributes:
        chat_template: the checkpoint's, in Jinja; "" when it has none.
    """

    chat_template: str = ""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """What holds an output to a format of calls.

    Attributes:
        spec: strict when all tools are. Otherwise what `GrammarBackend.check` names may be a strict tool's, too:
            whoever asks looks whose it is, by `places`.
        places: where the schema of each tool stands in the specification, as `check` writes places, such as
            `$.structures[0].schema`; empty where no schema is part of it.
        unenforced: what the format itself leaves out: the index of a tool, and keywords with their paths in its schema,
            such as `$.properties.a.minimum`. None of them is a strict tool's.
    """

    spec: GrammarSpec
    places: tuple[str, ...] = ()
    unenforced: tuple[tuple[int, str], ...] = ()

    def left_out(self, paths: Sequence[str]) -> list[tuple[int, str]]:
        """Return all that is not enforced, as `unenforced` does.

        Args:
            paths: what `GrammarBackend.check` named of the specification.

        Raises:
            ValueError: one of them is in no tool's schema.
        """
        return [*self.unenforced, *map(self._in_schema, paths)]

    def _in_schema(self, path: str) -> tuple[int, str]:
        for i, place in enumerate(self.places):
            if path.startswith(place) and path[len(place) :][:1] in ("", ".", "["):
                return i, "$" + path[len(place) :]
        raise ValueError(f"{path} is in no tool's schema; these stand at {', '.join(self.places) or 'no place'}")


class ToolCallParser(ABC):
    """Reads one completion's text as it comes. Used by one thread at a time.

    Invariants:
        - It never raises: what is no call of a known tool is content.
        - How the text is cut into pieces changes neither the content nor the calls, put together.
        - Text without a call comes back unchanged. White space next to a call may be left out.
        - Calls are numbered from 0 in order, and one ends before the next begins.
    """

    @abstractmethod
    def push(self, text: str) -> Sequence[MessageDelta]:
        """Take in more text; returns what is certain by now."""

    @abstractmethod
    def finish(self) -> Sequence[MessageDelta]:
        """Take in the end of the text; returns what was held back. Nothing may be pushed afterwards."""

    def cut_off(self) -> Sequence[MessageDelta]:
        """Take in the end of a text that goes no further because of a limit, such as that on its tokens.

        As `finish`, but what is held back because it may be the beginning of a call, be it of its markup, is left out.
        A parser that holds nothing back need not override it.
        """
        return self.finish()


class ToolCallFormat(ABC):
    """How a family of models writes tool calls.

    Special tokens are never text: grammars do not allow them and detokenising drops them. So a format whose marker is
    a special token neither waits for it nor enforces it.

    Invariants:
        - What `render` writes, a parser reads as the same calls.
        - What a grammar of `grammar` allows, a parser reads as calls of these tools.
    """

    @abstractmethod
    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser of one completion.

        Args:
            enforced: a grammar of `grammar` holds the text to the format, so that the beginning of a call makes a call
                sure, and its arguments may be told as they come. Otherwise a call is told once it is complete and
                well-formed. A call that the end of the text cuts short is then content, and else is told as far as it
                goes.
        """

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar | None:
        """Return what holds an output to the format.

        Args:
            tools: at least one.
            choice: `AUTO` leaves all text free but the calls; `REQUIRED` has the output begin with a call.
            parallel: more than one call may follow.

        Returns: a specification, and what becomes of each tool's schema in it; None where calls cannot be told from
            text before they are complete, which only `AUTO` may answer.

        Raises:
            GrammarError: this format cannot enforce the schema of a strict tool.
        """

    @abstractmethod
    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write calls as the model would, for conversations whose chat template knows no calls."""

    @abstractmethod
    def instructions(self, tools: Sequence[Tool]) -> str:
        """Tell a model of its tools and of this format, for chat templates that do not."""

    def new_id(self) -> str:
        """Draw the id of a call."""
        return f"call_{uuid.uuid4().hex[:24]}"


class ReasoningParser(ABC):
    """Parts one completion's text into reasoning and the rest. Used by one thread at a time.

    Invariants:
        - Those of `ToolCallParser`; what is no reasoning is content.
        - Up to two line ends after the reasoning's end are neither: an answer that a grammar holds begins behind them.
    """

    @abstractmethod
    def push(self, text: str) -> Sequence[ReasoningDelta | ContentDelta]:
        """Take in more text; returns what is certain by now."""

    @abstractmethod
    def finish(self) -> Sequence[ReasoningDelta | ContentDelta]:
        """Take in the end of the text; returns what was held back. Nothing may be pushed afterwards."""


class ReasoningFormat(ABC):
    """How a family of models marks its reasoning.

    Invariants:
        - Within the reasoning, `end` ends it.
        - A prompt that ends otherwise, or after the reasoning's end, leaves nothing open.

    Attributes:
        end: what ends the reasoning, as text of at most 32 characters; "" where nothing is reasoning.
        begin: what begins it, as text, where the model does; "" where only prompts do. A grammar leaves the model the
            choice, if this is a single token.
    """

    end: str
    begin: str = ""

    @abstractmethod
    def is_open(self, prompt_end: str) -> bool:
        """Whether a prompt leaves the reasoning open, so that the output begins with it.

        Args:
            prompt_end: the last characters of the prompt, special tokens included.
        """

    @abstractmethod
    def parser(self, *, is_open: bool) -> ReasoningParser:
        """Return a parser of one completion.

        Args:
            is_open: the output begins within the reasoning.
        """
