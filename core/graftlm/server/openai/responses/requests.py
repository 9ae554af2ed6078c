"""The bodies of /v1/responses requests, including fields that only graftlm has."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from graftlm.sampling_params import MAX_LOGPROBS
from graftlm.server.openai.requests import OpenAIModel
from graftlm.server.shared_fields import (
    CacheSalt,
    FrequencyPenalty,
    IgnoredText,
    LogitBias,
    MinP,
    PresencePenalty,
    Priority,
    RepetitionPenalty,
    RequestId,
    Seed,
    Temperature,
    TimeoutS,
    TopK,
    TopP,
)
from graftlm.server.wire import UNICODE, WHOLE, Text, Unsupported, one_or_many

__all__ = [
    "AllowedToolsChoice",
    "CallOutput",
    "FunctionCall",
    "FunctionChoice",
    "FunctionTool",
    "InputItem",
    "InputTokensRequest",
    "MessageItem",
    "OtherItem",
    "OtherPart",
    "OtherTool",
    "PromptFields",
    "ReasoningInput",
    "ResponsesRequest",
    "TextPart",
]

_TEXT_PARTS = {"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"}


class _Item(BaseModel):
    # Clients send back items of answers unchanged, with fields that graftlm ignores, such as `id`.
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class TextPart(_Item):
    """A content part with text."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: Text | None = None
    refusal: Text | None = None


class OtherPart(BaseModel):
    """A content part that is not text."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Text


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _kind_of_part(value: Any) -> str:
    kind = _type_of(value)
    return "as_text" if isinstance(kind, str) and kind in _TEXT_PARTS else "as_other"


_Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag("as_text")] | Annotated[OtherPart, Tag("as_other")], Discriminator(_kind_of_part)
]
_Parts: TypeAlias = Annotated[
    Annotated[Text, Tag("one")] | Annotated[list[_Part], Field(max_length=4096), Tag("many")],
    Discriminator(one_or_many),
]


class MessageItem(_Item):
    """A message of a conversation, or of an earlier answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class FunctionCall(_Item):
    """A function call in an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class CallOutput(_Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: _Parts


class ReasoningInput(_Item):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: list[_Part] | None = None
    summary: list[_Part] | None = None


class OtherItem(BaseModel):
    """An item of another type."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Text


_ITEMS = {"message", "function_call", "function_call_output", "reasoning"}


def _kind_of_item(value: Any) -> str:
    kind = _type_of(value)
    if kind is None:
        return "message"
    return kind if isinstance(kind, str) and kind in _ITEMS else "as_other"


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")]
    | Annotated[OtherItem, Tag("as_other")],
    Discriminator(_kind_of_item),
]
_Input: TypeAlias = Annotated[
    Annotated[Text, Tag("one")] | Annotated[list[InputItem], Field(max_length=4096), Tag("many")],
    Discriminator(one_or_many),
]


class FunctionTool(OpenAIModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="The JSON schema of the function's parameters, which are an object. Null: the function has no "
        "parameters.",
    )
    strict: bool | None = Field(
        default=None,
        description="Refuse a schema that cannot be enforced in full. If false or null, the parts that cannot be "
        "enforced are ignored.",
    )
    allowed_callers: list[Text] | None = Field(default=None, description="Accepted without effect.")
    output_schema: dict[str, Any] | None = Field(default=None, description="Accepted without effect.")
    defer_loading: Unsupported = None


class OtherTool(BaseModel):
    """A tool that runs on OpenAI's servers."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Text


def _kind_of_tool(value: Any) -> str:
    return "function" if _type_of(value) == "function" else "as_other"


class FunctionChoice(OpenAIModel):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    name: Text


class AllowedToolsChoice(OpenAIModel):
    """A `tool_choice` that limits calls to some functions. The prompt still describes all functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=128)]


def _kind_of_choice(value: Any) -> str:
    if isinstance(value, str):
        return "as_text"
    return "as_some" if _type_of(value) == "allowed_tools" else "as_object"


class TextFormat(OpenAIModel):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: Text | None = None


class TextConfig(OpenAIModel):
    """The settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Text | None = Field(default=None, description="Accepted without effect.")


class ReasoningConfig(OpenAIModel):
    """The settings of reasoning."""

    effort: Text | None = Field(
        default=None,
        description="Value of the variable `reasoning_effort` of the chat template. `none` also sets "
        "`enable_thinking` and `thinking` to false.",
    )
    summary: Text | None = Field(
        default=None, description="Accepted without effect: reasoning is returned in full, without a summary."
    )
    generate_summary: Text | None = Field(default=None, description="Accepted without effect.")
    context: Text | None = Field(default=None, description="Accepted without effect.")
    mode: Text | None = Field(default=None, description="Accepted without effect.")


class ResponseStreamOptions(OpenAIModel):
    """Options for streams."""

    include_obfuscation: bool | None = Field(
        default=False, description="Accepted without effect: events are not padded."
    )


class PromptFields(OpenAIModel):
    """The fields that requests for responses and for token counts share."""

    model: Text | None = Field(default=None, description="The model's name. Null: the served model.")
    input: _Input | None = Field(
        default=None,
        description="The user's text, or a list of items of type `message`, `function_call`, "
        "`function_call_output` and `reasoning`.",
    )
    instructions: Text | None = Field(
        default=None,
        description="The system message of this response. It does not apply to responses that continue the "
        "conversation.",
    )
    previous_response_id: Annotated[str, Field(max_length=256), UNICODE] | None = Field(
        default=None,
        description="The id of a stored response. Its conversation is continued. Null: a new conversation.",
    )
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("as_other")],
                    Discriminator(_kind_of_tool),
                ]
            ],
            Field(max_length=128),
        ]
        | None
    ) = Field(default=None, description="Functions that the model may call.")
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("as_text")]
            | Annotated[FunctionChoice, Tag("as_object")]
            | Annotated[AllowedToolsChoice, Tag("as_some")],
            Discriminator(_kind_of_choice),
        ]
        | None
    ) = Field(
        default=None, description="`auto`, `none`, `required`, or the function that must be called. Null: `auto`."
    )
    parallel_tool_calls: bool | None = Field(
        default=True, description="Whether one answer may contain several tool calls."
    )
    text: TextConfig | None = Field(default=None, description="The format that the text of the answer must match.")
    reasoning: ReasoningConfig | None = Field(default=None, description="Settings of the model's reasoning.")
    truncation: Literal["disabled"] | None = Field(
        default="disabled", description="Only `disabled` is supported: a conversation that is too long is refused."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables of the model's chat template."
    )
    conversation: Unsupported = None


class InputTokensRequest(PromptFields):
    """A prompt whose tokens are counted."""

    known_at: ClassVar[str | None] = "/v1/responses/input_tokens"


class ResponsesRequest(PromptFields):
    """A conversation to continue."""

    known_at: ClassVar[str | None] = "/v1/responses"

    store: bool | None = Field(default=True, description="Store the response, for `previous_response_id` and GET.")
    stream: bool | None = Field(default=False, description="Answer with server-sent events.")
    stream_options: ResponseStreamOptions | None = Field(
        default=None, description="Options of the stream. Only allowed with `stream`."
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="Maximum number of tokens to generate. Null: generate until the context is full."
    )
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        default=None,
        description="Return the log-probabilities of the answer's tokens, and of this number of the most likely "
        "tokens at each position.",
    )
    include: list[Text] | None = Field(
        default=None,
        description="With `message.output_text.logprobs`, log-probabilities are returned. Other values are accepted "
        "without effect.",
    )
    metadata: dict[str, Any] | None = Field(
        default=None, description="Values that the response object returns unchanged."
    )
    user: IgnoredText = None
    safety_identifier: Text | None = Field(default=None, description="Accepted without effect.")
    prompt_cache_key: Text | None = Field(
        default=None,
        description="The routing policy `consistent_hash` sends requests with the same key to the same replica. Cached "
        "prefixes are found by their content.",
    )
    prompt_cache_retention: Text | None = Field(default=None, description="Accepted without effect.")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="Accepted without effect.")
    service_tier: Text | None = Field(default=None, description="Accepted without effect.")
    max_tool_calls: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="Accepted without effect: the limit is for tools that run on OpenAI's servers."
    )
    background: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    # fields that OpenAI does not have
    top_k: TopK = None
    min_p: MinP = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    presence_penalty: PresencePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    ignore_eos: bool | None = Field(default=False, description="Do not stop at the end-of-sequence token.")
    stop: (
        Annotated[
            Annotated[str, Field(min_length=1, max_length=1024), UNICODE, Tag("one")]
            | Annotated[
                list[Annotated[str, Field(min_length=1, max_length=1024), UNICODE]], Field(max_length=64), Tag("many")
            ],
            Discriminator(one_or_many),
        ]
        | None
    ) = Field(default=None, description="Strings that end the output.")
    seed: Seed = None
    logit_bias: LogitBias = None
    cache_salt: CacheSalt = None
    priority: Priority = 0
    timeout_s: TimeoutS = None
    request_id: RequestId = None
