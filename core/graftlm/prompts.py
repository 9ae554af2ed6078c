"""The forms of prompts that users may pass; types and nesting distinguish them."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvalidPromptError
from graftlm.types import Message

__all__ = ["Prompt", "Prompts", "TextPair", "check_chat", "is_chat", "split_prompts"]

#: Text, token ids, or a chat.
Prompt: TypeAlias = str | Sequence[int] | NDArray[Any] | Sequence[Message]
#: One prompt or a list of them.
Prompts: TypeAlias = Prompt | Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that the checkpoint's tokenizer joins to one prompt for its score head."""

    first: str
    second: str


def is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def check_chat(messages: Sequence[Message]) -> Sequence[Message]:
    """Check that each message of a chat is a mapping with a role and a content (or tool calls); return the chat.

    Raises:
        InvalidPromptError: a message has another form; the error has the message.
    """
    for i, message in enumerate(messages):
        is_mapping = isinstance(message, Mapping)
        if not is_mapping or not isinstance(message.get("role"), str):
            raise InvalidPromptError(f"chat message {i} needs a role and a content, got {reprlib.repr(message)}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise InvalidPromptError(f"chat message {i} has no content: {reprlib.repr(message)}")
    return messages


def split_prompts(prompts: Prompts) -> list[Prompt]:
    """Return the prompts of one call as a list.

    "text", [1, 2, 3] and [{"role": ...}] are one prompt each; a list of such prompts is several prompts.

    Raises:
        InvalidPromptError: the value is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str) or is_chat(prompts):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidPromptError(
            f"a prompt is text, a list of token ids or a list of chat messages, got {type(prompts).__name__}"
        )
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
