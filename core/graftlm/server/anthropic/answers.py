"""The bodies of answers and events in Anthropic's API."""

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
    """A block of text in the answer."""

    text: str
    citations: None = None


class ThinkingBlockBody(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """A block of reasoning. The signature is a hash of the text. Signatures that clients send back are not checked."""

    thinking: str
    signature: str


class ToolUseBody(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A block with a tool call that the client has to execute."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock: TypeAlias = TextBlockBody | ThinkingBlockBody | ToolUseBody


class OutputDetails(msgspec.Struct, frozen=True):
    """The number of output tokens that belong to the reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. The number of prompt tokens is `input_tokens` plus `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails | None = None


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: Sequence[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    """The number of tokens in a prompt."""

    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event, which contains the message without its content."""

    message: MessageBody


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """An event without content that keeps the connection open."""


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """The first event of a block."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """New text of the answer."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """New text of the reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature of a reasoning block, sent before the block ends."""

    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """New JSON text of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """An event with new content of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """The last event of a block."""

    index: int


class MessageChange(msgspec.Struct, frozen=True):
    """The reason why the answer ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """The event that contains the reason why the answer ended, and the token counts."""

    delta: MessageChange
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event of an answer."""


Event: TypeAlias = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def encode_event(event: Event) -> bytes:
    """Return an event in SSE format, with its name."""
    name = event.__struct_config__.tag
    return b"event: %b\ndata: %b\n\n" % (str(name).encode(), _encode(event))
