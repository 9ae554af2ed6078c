"""The forms in which prompts can be sent."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["ChatPrompt", "Prompt", "TextPrompt", "TokenPrompt", "WorkItem"]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as text, which the server tokenizes."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids, which the server uses unchanged.

    Attributes:
        token_ids: array with type code "i". It needs less memory than a list, and a long run has millions of ids.
    """

    token_ids: "array[int]"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as chat messages, which the server renders with the model's template."""

    messages: Sequence[Mapping[str, Any]]


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a workload.

    Attributes:
        prompt: the prompt.
        output_tokens: maximum number of tokens to generate.
    """

    prompt: Prompt
    output_tokens: int
