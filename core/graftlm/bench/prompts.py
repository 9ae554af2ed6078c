"""The forms a prompt can be sent in."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["ChatPrompt", "Prompt", "TextPrompt", "TokenPrompt", "WorkItem"]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text; the server tokenises it."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, which the server takes as they are.

    Attributes:
        token_ids: of type code "i"; a long run holds millions.
    """

    token_ids: "array[int]"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat messages; the server renders them by the model's template."""

    messages: Sequence[Mapping[str, Any]]


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request to make.

    Attributes:
        output_tokens: to generate at most.
    """

    prompt: Prompt
    output_tokens: int
