"""The bodies of requests to Anthropic's API, including fields that only graftlm has."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from graftlm.server.openai.requests import OpenAIModel
from graftlm.server.shared_fields import (
    CacheSalt,
    LogitBias,
    Priority,
    RequestId,
    Seed,
    Temperature,
    TimeoutS,
    TopK,
    TopP,
)
from graftlm.server.wire import UNICODE, WHOLE, Text, Unsupported, one_or_many

__all__ = [
    "ContentBlock",
    "CountTokensRequest",
    "CustomTool",
    "MessageTurn",
    "MessagesRequest",
    "OtherBlock",
    "OtherTool",
    "PromptFields",
    "TextBlock",
    "ThinkingBlock",
    "ToolResultBlock",
    "ToolUseBlock",
]

_CacheControl: TypeAlias = Annotated[
    dict[str, Any] | None, Field(description="Accepted without effect: cached prefixes are found by their content.")
]
_StopString = Annotated[str, Field(min_length=1, max_length=1024), UNICODE]


class TextBlock(OpenAIModel):
    """A block of text."""

    type: Literal["text"]
    text: Text
    cache_control: _CacheControl = None
    citations: list[Any] | None = Field(default=None, description="Accepted without effect.")


class ThinkingBlock(OpenAIModel):
    """The reasoning of an earlier answer, sent back unchanged."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = Field(default=None, description="Not checked.")


class ToolUseBlock(OpenAIModel):
    """A tool call in an earlier answer, sent back unchanged."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    cache_control: _CacheControl = None
    caller: dict[str, Any] | None = Field(default=None, description="Accepted without effect.")


class OtherBlock(BaseModel):
    """A block of another type."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Text


def _kind_of_text(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "text" if kind == "text" else "as_other"


_TextOrOther: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("as_other")], Discriminator(_kind_of_text)
]
_Texts: TypeAlias = Annotated[
    Annotated[Text, Tag("one")] | Annotated[list[_TextOrOther], Field(max_length=4096), Tag("many")],
    Discriminator(one_or_many),
]


class ToolResultBlock(OpenAIModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: _Texts | None = Field(default=None, description="A text, or a list of blocks of type `text`.")
    is_error: bool | None = Field(default=None, description="Accepted without effect: the model sees only the content.")
    cache_control: _CacheControl = None


_BLOCKS = {"text", "thinking", "tool_use", "tool_result"}


def _kind_of_block(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in _BLOCKS else "as_other"


ContentBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("as_other")],
    Discriminator(_kind_of_block),
]


class MessageTurn(OpenAIModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag("one")] | Annotated[list[ContentBlock], Field(max_length=4096), Tag("many")],
        Discriminator(one_or_many),
    ] = Field(
        description="A text, or a list of blocks of type `text`, `image`, `thinking`, `tool_use` and `tool_result`."
    )


class CustomTool(OpenAIModel):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    input_schema: dict[str, Any] = Field(description="The JSON schema of the tool's input, which is an object.")
    strict: bool | None = Field(
        default=None,
        description="Refuse a schema that cannot be enforced in full. If false or null, the parts that cannot be "
        "enforced are ignored.",
    )
    cache_control: _CacheControl = None
    input_examples: list[dict[str, Any]] | None = Field(default=None, description="Accepted without effect.")
    eager_input_streaming: bool | None = Field(
        default=None, description="Accepted without effect: inputs are always streamed."
    )
    allowed_callers: list[Text] | None = Field(default=None, description="Accepted without effect.")
    defer_loading: Unsupported = None


class OtherTool(BaseModel):
    """A tool that runs on Anthropic's servers, or that Anthropic defines."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Text


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if kind in (None, "custom") else "as_other"


class ToolChoiceBody(OpenAIModel):
    """The setting of whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(default=None, description="For type `tool`: the name of the tool that must be called.")
    disable_parallel_tool_use: bool | None = Field(
        default=False, description="Allow at most one tool call in the answer."
    )


class ThinkingBody(OpenAIModel):
    """The settings of reasoning."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="`enabled` and `disabled` set the variables `enable_thinking` and `thinking` of the chat "
        "template; with the other types, the variables keep the template's defaults. `disabled` also "
        "removes reasoning from the answer."
    )
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="Accepted without effect: the number of reasoning tokens is not limited."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None,
        description="`omitted`: thinking blocks have no text. `summarized` or null: they have the full text.",
    )


class OutputFormat(OpenAIModel):
    """A JSON schema that constrains the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenAIModel):
    """The settings of the answer's format."""

    effort: Text | None = Field(
        default=None,
        description="Value of the variable `reasoning_effort` of the chat template. Null: the template's default.",
    )
    format: OutputFormat | None = None


class PromptFields(OpenAIModel):
    """The fields that requests for messages and for token counts share."""

    model: Text | None = Field(default=None, description="The model's name. Null: the served model.")
    messages: Annotated[list[MessageTurn], Field(min_length=1, max_length=4096)] = Field(
        description="The conversation so far. If the last turn is the assistant's, the answer continues this turn."
    )
    system: _Texts | None = Field(
        default=None, description="The system prompt: a text, or a list of blocks of type `text`."
    )
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[CustomTool, Tag("custom")] | Annotated[OtherTool, Tag("as_other")],
                    Discriminator(_kind_of_tool),
                ]
            ],
            Field(max_length=128),
        ]
        | None
    ) = Field(default=None, description="Functions that the model may call.")
    tool_choice: ToolChoiceBody | None = Field(
        default=None, description="Whether the answer may or must call tools. Null: `auto`."
    )
    thinking: ThinkingBody | None = Field(
        default=None, description="Settings of the model's reasoning. Null: the defaults of the chat template."
    )
    output_config: OutputConfig | None = Field(default=None, description="Format and reasoning effort of the answer.")
    cache_control: _CacheControl = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables of the model's chat template."
    )
    context_management: Unsupported = None
    mcp_servers: Unsupported = None
    speed: Text | None = Field(default=None, description="Accepted without effect.")


class CountTokensRequest(PromptFields):
    """A prompt whose tokens are counted."""

    known_at: ClassVar[str | None] = "/v1/messages/count_tokens"


class MessagesRequest(PromptFields):
    """A conversation to continue."""

    known_at: ClassVar[str | None] = "/v1/messages"

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] = Field(
        description="Maximum number of tokens to generate."
    )
    stop_sequences: Annotated[list[_StopString], Field(max_length=64)] | None = Field(
        default=None, description="Strings that end the output."
    )
    stream: bool | None = Field(default=False, description="Answer with server-sent events.")
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = None
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted without effect.")
    service_tier: Text | None = Field(default=None, description="Accepted without effect.")
    inference_geo: Text | None = Field(default=None, description="Accepted without effect.")
    diagnostics: dict[str, Any] | None = Field(default=None, description="Accepted without effect.")
    container: Unsupported = None
    seed: Seed = None
    logit_bias: LogitBias = None
    cache_salt: CacheSalt = None
    priority: Priority = 0
    timeout_s: TimeoutS = None
    request_id: RequestId = None
