"""The forms of prompts that users may pass; types and nesting distinguish them."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvalidPromptError
from graftlm.media import has_media
from graftlm.types import Message

__all__ = [
    "MediaPrompt",
    "Prompt",
    "Prompts",
    "TextPair",
    "check_chat",
    "is_chat",
    "is_with_pictures",
    "split_prompts",
    "with_images",
]


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """Text or token ids with pictures.

    Attributes:
        prompt: text or token ids with one marker of the model, such as "<image>", for each picture. If a text has no
            markers, the pictures precede it.
        images: the pictures, in order; see `graftlm.media.MediaSource`.
    """

    prompt: "str | Sequence[int] | NDArray[Any]"
    images: Sequence[Any]


#: Text, token ids, a chat, or text with pictures.
Prompt: TypeAlias = str | Sequence[int] | NDArray[Any] | Sequence[Message] | MediaPrompt
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


def is_with_pictures(prompt: object) -> bool:
    """Return whether a prompt has pictures."""
    return isinstance(prompt, MediaPrompt) or (is_chat(prompt) and has_media(prompt))


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
    if isinstance(prompts, str | MediaPrompt) or is_chat(prompts):
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


def with_images(prompts: list[Prompt], image_data: Any, *, is_one: bool) -> list[Prompt]:
    """Return the prompts of one call with their pictures.

    Args:
        image_data: one picture or a list of them for one prompt; a list with one entry per prompt for several, each a
            picture, a list of pictures or None. None: no pictures.
        is_one: whether the call has one prompt, and not a list.

    Raises:
        InvalidPromptError: the numbers differ, or a prompt is a chat, whose pictures are content parts.
    """
    if image_data is None:
        return prompts
    if is_one:
        entries = [image_data]
    else:
        entries = list(image_data) if isinstance(image_data, list | tuple) else [image_data] * len(prompts)
    if len(entries) != len(prompts):
        raise InvalidPromptError(
            f"image_data: got {len(entries)} entries, expected one for each of {len(prompts)} prompts"
        )
    return [_with_images(prompt, entry) for prompt, entry in zip(prompts, entries, strict=True)]


def _with_images(prompt: Prompt, entry: Any) -> Prompt:
    images = [] if entry is None else list(entry) if isinstance(entry, list | tuple) else [entry]
    if not images:
        return prompt
    if isinstance(prompt, MediaPrompt) or is_chat(prompt):
        raise InvalidPromptError("image_data: the pictures of a chat are content parts of its messages")
    return MediaPrompt(prompt, images)  # type: ignore[arg-type]
