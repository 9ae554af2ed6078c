"""Splits chat messages into messages for a chat template and the pictures of their content parts."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from graftlm.errors import InvalidPromptError, MediaError
from graftlm.media.sources import MediaSource
from graftlm.types import Message

__all__ = ["NO_PICTURES", "has_media", "split_media"]

NO_PICTURES: Final = "this model cannot use pictures: its checkpoint has no tower for them"

_IMAGE_TYPES: Final = ("image_url", "image", "input_image")
_TEXT_TYPES: Final = ("text", "input_text", "output_text")
#: Names under which a part of the type "image" may have its picture.
_IMAGE_ENTRIES: Final = ("image", "image_url", "url", "path", "base64", "data")


def has_media(messages: Sequence[Message]) -> bool:
    """Return whether a content part of a chat is a picture."""
    return any(_is_image(part) for message in messages for part in _parts(message))


def split_media(
    messages: Sequence[Message], marker: str | None = None, *, wraps_text: bool = False
) -> tuple[list[Message], list[MediaSource]]:
    """Return the messages for a chat template, and the pictures in their order.

    Args:
        messages: chat messages; a content may be a list of parts such as {"type": "text", "text": ...} and
            {"type": "image_url", "image_url": {"url": ...}}.
        marker: text that replaces a picture if the template expects contents as text. None: pictures become parts
            {"type": "image"}.
        wraps_text: whether a content that is text becomes a list with one text part.

    Raises:
        InvalidPromptError: a part has no or another type.
        MediaError: a part has no picture.
    """
    sources: list[MediaSource] = []
    split: list[Message] = []
    for message in messages:
        parts = _parts(message)
        if wraps_text and isinstance(message.get("content"), str):
            parts = [message["content"]]
        if not parts:
            split.append(message)
            continue
        converted = [_converted(part, sources) for part in parts]
        content: Any = converted
        if marker is not None:
            content = "".join(marker if part["type"] == "image" else part["text"] for part in converted)
        split.append({**message, "content": content})
    return split, sources


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES


def _converted(part: object, sources: list[MediaSource]) -> dict[str, str]:
    """Return a part for the template; append the picture of an image part to `sources`."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in _TEXT_TYPES and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(part, Mapping) and kind in _IMAGE_TYPES:
        sources.append(_source_of(part))
        return {"type": "image"}
    raise InvalidPromptError(f"a content part has the type text or image_url, got {str(kind)[:60]!r}")


def _source_of(part: Mapping[str, Any]) -> MediaSource:
    for name in _IMAGE_ENTRIES:
        value = part.get(name)
        if isinstance(value, Mapping):
            value = value.get("url")
        if value is not None:
            return value
    raise MediaError('an image part needs its picture, such as {"type": "image_url", "image_url": {"url": "data:..."}}')
