"""The bodies of Anthropic's answers and events."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

__all__ = [
    "BlockDelta",
    "BlockStart",
    "BlockStop",
    "ContentBlock",
    "Event",
    "InputDelta",
    "MessageBody",
    "MessageChange",
    "MessageDelta",
    "MessageStart",
    "MessageStop",
    "MessageUsage",
    "OutputDetails",
    "Ping",
    "SignatureDelta",
    "TextBlockBody",
    "TextDelta",
    "ThinkingBlockBody",
    "ThinkingDelta",
    "TokenCount",
    "ToolUseBody",
    "encode_event",
]

_encode = msgspec.json.Encoder().encode


class TextBlockBody(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str
    citations: None = None


class ThinkingBlockBody(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning of the answer; the signature is a hash of the text, and is not checked when it comes back."""

    thinking: str
    signature: str


class ToolUseBody(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the client is to make."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock: TypeAlias = TextBlockBody | ThinkingBlockBody | ToolUseBody


class OutputDetails(msgspec.Struct, frozen=True):
    """Of the output's tokens, those of the reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; the prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails | None = None


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: Sequence[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    """The number of a prompt's tokens."""

    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event: the message without content."""

    message: MessageBody


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """Keeps the connection open."""


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature of the reasoning, before its block ends."""

    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """What is new of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageChange(msgspec.Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """The end of the answer, with the token counts."""

    delta: MessageChange
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


Event: TypeAlias = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def encode_event(event: Event) -> bytes:
    """Return an event as it is sent, with its name."""
    name = event.__struct_config__.tag
    return b"event: %b\ndata: %b\n\n" % (str(name).encode(), _encode(event))
