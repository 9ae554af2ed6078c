"""The bodies of responses and of the events that stream them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from graftlm.server.openai.answers import ContentToken

__all__ = [
    "ArgumentsDelta",
    "ArgumentsDone",
    "CallItem",
    "DeletedResponse",
    "Incomplete",
    "InputTokenCount",
    "InputTokensDetails",
    "ItemAdded",
    "ItemDone",
    "ItemList",
    "MessageItemBody",
    "OutputItem",
    "OutputText",
    "OutputTokensDetails",
    "PartAdded",
    "PartDone",
    "ReasoningItem",
    "ReasoningTextDelta",
    "ReasoningTextDone",
    "ReasoningTextPart",
    "ResponseBody",
    "ResponseCompleted",
    "ResponseCreated",
    "ResponseEvent",
    "ResponseFailed",
    "ResponseFailure",
    "ResponseInProgress",
    "ResponseIncomplete",
    "ResponseUsage",
    "TextDelta",
    "TextDone",
]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of the answer."""

    text: str
    annotations: Sequence[Any] = ()
    logprobs: Sequence[ContentToken] = ()


class ReasoningTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """The reasoning of the answer."""

    text: str


class MessageItemBody(msgspec.Struct, frozen=True, tag_field="type", tag="message", kw_only=True):
    """The message of the answer."""

    id: str
    role: str = "assistant"
    status: str
    content: Sequence[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning", kw_only=True):
    """The reasoning before the answer."""

    id: str
    status: str
    summary: Sequence[Any] = ()
    content: Sequence[ReasoningTextPart]
    encrypted_content: None = None


class CallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call", kw_only=True):
    """A function call that the client has to execute."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


OutputItem: TypeAlias = MessageItemBody | ReasoningItem | CallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """The number of prompt tokens that were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """The number of output tokens that belong to the reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True):
    """The reason why a response failed."""

    code: str
    message: str


class Incomplete(msgspec.Struct, frozen=True):
    """The reason why a response is incomplete."""

    reason: str


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response, with the settings of its request."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Mapping[str, Any]
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Mapping[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float | None
    text: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str = "disabled"
    unenforced: Sequence[str] | msgspec.UnsetType = msgspec.UNSET
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that was deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tokens in a prompt."""

    object: str = "response.input_tokens"
    input_tokens: int


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """The items of a response's conversation."""

    object: str = "list"
    data: Sequence[Mapping[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseCreated(msgspec.Struct, frozen=True, tag_field="type", tag="response.created"):
    """The first event of a response."""

    sequence_number: int
    response: ResponseBody


class ResponseInProgress(msgspec.Struct, frozen=True, tag_field="type", tag="response.in_progress"):
    """The second event of a response."""

    sequence_number: int
    response: ResponseBody


class ResponseCompleted(msgspec.Struct, frozen=True, tag_field="type", tag="response.completed"):
    """The last event of a response that was not cut off."""

    sequence_number: int
    response: ResponseBody


class ResponseIncomplete(msgspec.Struct, frozen=True, tag_field="type", tag="response.incomplete"):
    """The last event of a response that was cut off by `max_output_tokens` or by the context length."""

    sequence_number: int
    response: ResponseBody


class ResponseFailed(msgspec.Struct, frozen=True, tag_field="type", tag="response.failed"):
    """The last event of a response that failed."""

    sequence_number: int
    response: ResponseBody


class ItemAdded(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_item.added"):
    """The first event of an item."""

    sequence_number: int
    output_index: int
    item: OutputItem


class ItemDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_item.done"):
    """The last event of an item."""

    sequence_number: int
    output_index: int
    item: OutputItem


class PartAdded(msgspec.Struct, frozen=True, tag_field="type", tag="response.content_part.added"):
    """The first event of a part of an item."""

    sequence_number: int
    item_id: str
    output_index: int
    part: OutputText | ReasoningTextPart
    content_index: int = 0


class PartDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.content_part.done"):
    """The last event of a part of an item."""

    sequence_number: int
    item_id: str
    output_index: int
    part: OutputText | ReasoningTextPart
    content_index: int = 0


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_text.delta"):
    """An event with new text of the answer."""

    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    logprobs: Sequence[ContentToken] = ()
    content_index: int = 0


class TextDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_text.done"):
    """The event after the last text of the answer."""

    sequence_number: int
    item_id: str
    output_index: int
    text: str
    logprobs: Sequence[ContentToken] = ()
    content_index: int = 0


class ReasoningTextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="response.reasoning_text.delta"):
    """An event with new text of the reasoning."""

    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0


class ReasoningTextDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.reasoning_text.done"):
    """The event after the last text of the reasoning."""

    sequence_number: int
    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsDelta(msgspec.Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.delta"):
    """An event with new JSON text of a call's arguments."""

    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.done"):
    """The event after the last text of a call's arguments."""

    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)
