"""The bodies of requests to OpenAI's API, including fields that only graftlm has."""

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from graftlm.config.problems import nearest
from graftlm.contracts import MAX_CHOICES
from graftlm.sampling_params import MAX_LOGPROBS
from graftlm.server.errors import MISSPELT
from graftlm.server.known_fields import without_defaults, without_empty
from graftlm.server.openai.other_names import with_own_names
from graftlm.server.openai.tool_requests import ToolChoiceField, ToolsField
from graftlm.server.shared_fields import (
    CacheSalt,
    FrequencyPenalty,
    IgnoredText,
    LogitBias,
    MaskedLogprobs,
    MinP,
    Name,
    PresencePenalty,
    Priority,
    RepetitionPenalty,
    RequestId,
    Seed,
    StopPatterns,
    Temperature,
    TimeoutS,
    TopK,
    TopP,
)
from graftlm.server.wire import (
    MAX_PROMPTS,
    UNICODE,
    WHOLE,
    LogitsProcessors,
    OneOrMany,
    PromptIds,
    ReasoningBegin,
    ReasoningEnd,
    SchemaField,
    Text,
    TextOrObject,
    TokenIdList,
    Unsupported,
    one_or_many,
)

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "OpenAIModel",
    "PromptsField",
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
]

#: Maximum number of characters of an unknown field's name that are compared with the names of known fields.
_MAX_NAME_LEN: Final = 64

#: Maximum number of unknown fields that are compared with known fields.
_MAX_HINTS: Final = 8

_StopString = Annotated[str, Field(min_length=1, max_length=1024), UNICODE]
_Stops = Annotated[
    Annotated[_StopString, Tag("one")] | Annotated[list[_StopString], Field(max_length=64), Tag("many")],
    Discriminator(one_or_many),
]


def _shape_of_prompts(value: Any) -> str:
    """Return the tag for a text, a list of texts, token ids, or a list of token ids. Only the first element is read."""
    if not isinstance(value, list):
        return "one"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "many_of_ids"
    return "one_of_ids" if isinstance(first, int | float) else "many"


PromptsField = Annotated[
    Annotated[Text, Tag("one")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("many")]
    | Annotated[PromptIds, Tag("one_of_ids")]
    | Annotated[list[PromptIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("many_of_ids")],
    Discriminator(_shape_of_prompts),
]
_NumTokens: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE]


def _check_truncation(value: int) -> int:
    if value == 0:
        raise PydanticCustomError(
            "no_tokens", "must be a number of tokens, or -1 for as many as the context has room for"
        )
    return value


_Truncation: TypeAlias = Annotated[
    Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE, AfterValidator(_check_truncation)] | None,
    Field(
        description="Use only this number of tokens from the end of the prompt. -1: as many tokens as the context has "
        "room for. Null: all tokens; a prompt that is too long is refused."
    ),
]


class OpenAIModel(BaseModel):
    """A JSON object of known fields, each with its own type. Null means the field's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    #: Path for `known_fields`. Fields that other servers have at this path are accepted if they have their default
    #: value. If the path is None, such fields are refused.
    known_at: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelt(cls, value: Any) -> Any:
        """Refuse an unknown field whose name is similar to a known one, with a hint.

        pydantic refuses the other unknown fields.
        """
        if cls.known_at is not None and isinstance(value, Mapping):
            value = without_defaults(without_empty(value), cls.model_fields, cls.known_at)
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = (name for name in value if name not in known) if isinstance(value, Mapping) else ()
        for name in islice(unknown, _MAX_HINTS):
            close = nearest(name[:_MAX_NAME_LEN], known)
            if close is not None:
                raise PydanticCustomError(MISSPELT, "did you mean '{close}'?", {"name": name, "close": close})
        return value


class StreamOptions(OpenAIModel):
    """Options for streams."""

    known_at: ClassVar[str | None] = "/v1/chat/completions#stream_options"

    include_usage: bool | None = Field(default=False, description="Send the token counts in an additional last event.")
    include_obfuscation: bool | None = Field(
        default=False, description="Accepted without effect: events are not padded."
    )
    continuous_usage_stats: bool | None = Field(
        default=False, description="Add the token counts so far to every event, as `usage`."
    )


class JsonSchemaFormat(OpenAIModel):
    """A JSON schema, with its name."""

    name: Text
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(
        default=None,
        description="If true, a schema that cannot be enforced in full is refused. If false, the parts that cannot "
        "be enforced are ignored. Null: the request's `strict`.",
    )
    description: Text | None = None


class TagStructure(OpenAIModel):
    """A part of an answer that a schema or a regular expression constrains, with the texts before and after it."""

    begin: Text
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="A JSON schema of this part. Null: any JSON value."
    )
    regex: Text | None = Field(default=None, description="A regular expression, instead of `schema`.")
    end: Text


class ResponseFormat(OpenAIModel):
    """The format that constrains an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="For `structural_tag`: the parts that a trigger text can start."
    )
    triggers: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = Field(
        default=None,
        description="For `structural_tag`: the trigger texts. The `begin` of each structure starts with a trigger "
        "text.",
    )
    at_least_one: bool | None = Field(
        default=None, description="For `structural_tag`: whether the answer must start with a structure."
    )
    stop_after_first: bool | None = Field(
        default=None, description="For `structural_tag`: whether the answer ends after the first structure."
    )


class SamplingFields(OpenAIModel):
    """The fields that chats and completions share."""

    model: Text | None = Field(default=None, description="The model's name. Null: the served model.")
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = Field(default=1, description="Number of answers per prompt.")
    stop: _Stops | None = Field(default=None, description="Strings that end the output.")
    stop_regex: StopPatterns = None
    seed: Seed = None
    frequency_penalty: FrequencyPenalty = 0.0
    presence_penalty: PresencePenalty = 0.0
    logit_bias: LogitBias = None
    stream: bool | None = Field(default=False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(
        default=None, description="Additional content of the stream. Only allowed with `stream`."
    )
    user: IgnoredText = None
    # fields that OpenAI does not have
    top_k: TopK = None
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(
        default=0,
        description="Minimum number of tokens to generate. Stop tokens and stop strings have no effect before this "
        "number is reached.",
    )
    stop_token_ids: TokenIdList | None = Field(default=None, description="Tokens that end the output.")
    include_stop_str_in_output: bool | None = Field(
        default=False, description="Keep the match of a stop string, expression or token in the text."
    )
    ignore_eos: bool | None = Field(default=False, description="Do not stop at the end-of-sequence token.")
    skip_special_tokens: bool | None = Field(default=True, description="Leave special tokens out of the text.")
    json_schema: SchemaField | None = Field(
        default=None, description="A JSON schema that the output must match, as text or as an object."
    )
    regex: Text | None = Field(default=None, description="A regular expression that the output must match.")
    ebnf: Text | None = Field(default=None, description="A grammar in EBNF that the output must match.")
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        default=None, description="A list of strings. The output must be one of them."
    )
    structural_tag: TextOrObject | None = Field(
        default=None,
        description="Schemas for parts of the output, as text or as an object. Each part starts with a trigger text.",
    )
    strict: bool | None = Field(
        default=None,
        description="Refuse a `json_schema` or `structural_tag` that cannot be enforced in full. If false, the "
        "parts that cannot be enforced are ignored and listed in `unenforced`. Null: true. The value "
        "also applies to a `response_format` and to tools that have no `strict`; for these, null means "
        "true for a `response_format` and false for tools.",
    )
    grammar_backend: Text | None = Field(
        default=None, description="The name of the grammar backend to use. Null: the server's `grammar.name`."
    )
    jump_forward: bool | None = Field(
        default=None,
        description="If false, every token under a grammar is sampled, even if the grammar allows only one. If "
        "null or true, the server's `grammar.jump_forward` applies.",
    )
    speculation: bool | None = Field(
        default=None,
        description="If false, no tokens are drafted. If null or true, the server's `speculation` section applies. "
        "The output is the same.",
    )
    logits_processors: LogitsProcessors | None = Field(
        default=None,
        description="Options of logits processors, by the name of the processor. Plugins provide the processors.",
    )
    masked_logprobs: MaskedLogprobs = False
    cache_salt: CacheSalt = None
    priority: Priority = 0
    timeout_s: TimeoutS = None
    request_id: RequestId = Field(
        default=None,
        description="The `id` of the answer, for /abort_request. Null: the server creates one. `rid` is another name "
        "of this field.",
    )
    extra_key: Annotated[str, Field(max_length=1024), UNICODE] | None = Field(
        default=None,
        description="Has the same effect as `cache_salt`. If both are given, the salt is their combination.",
    )
    lora_path: Name | None = Field(
        default=None, description="The name of a loaded adapter. It may also be given in `model`, as `model:adapter`."
    )
    return_cached_tokens_details: bool | None = Field(
        default=False, description="Accepted without effect: `usage` always contains the cached tokens by tier."
    )
    response_format: ResponseFormat | None = Field(default=None, description="The format that the answer must match.")
    truncate_prompt_tokens: _Truncation = None

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: Any) -> Any:
        return with_own_names(without_empty(value)) if isinstance(value, Mapping) else value


class TextPart(OpenAIModel):
    """A piece of a message's text."""

    type: Literal["text", "input_text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.shown is None:
            raise PydanticCustomError("no_text", "a part of a message has no text")
        return self

    @property
    def shown(self) -> str | None:
        """The text that the part adds to the message."""
        return self.refusal if self.type == "refusal" else self.text


class OtherPart(BaseModel):
    """A piece of a message that is not text."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Text


def _kind_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "as_text" if kind in ("text", "input_text", "refusal") else "as_other"


ContentPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag("as_text")] | Annotated[OtherPart, Tag("as_other")], Discriminator(_kind_of_part)
]


_Content = Annotated[
    Annotated[Text, Tag("one")] | Annotated[list[ContentPart], Field(max_length=4096), Tag("many")],
    Discriminator(one_or_many),
]


class ChatMessage(OpenAIModel):
    """One message of a chat. The fields of answers are accepted, so that clients can send answers back unchanged."""

    known_at: ClassVar[str | None] = "/v1/chat/completions#messages"

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: _Content | None = Field(
        default=None, description="A text, or a list of parts of the types `text` and `image_url`."
    )
    name: Text | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatRequest(SamplingFields):
    """A chat to continue."""

    known_at: ClassVar[str | None] = "/v1/chat/completions"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, description="The conversation so far.")]
    max_tokens: _NumTokens | None = Field(default=None, description="As `max_completion_tokens`.")
    max_completion_tokens: _NumTokens | None = Field(
        default=None, description="Maximum number of tokens to generate. Null: generate until the context is full."
    )
    logprobs: bool | None = Field(default=False, description="Return the log-probabilities of the answer's tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        default=None, description="Also return this number of the most likely tokens at each position."
    )
    tools: ToolsField | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: ToolChoiceField | None = Field(
        default=None, description="`auto`, `none`, `required`, or the function that must be called. Null: `auto`."
    )
    parallel_tool_calls: bool | None = Field(
        default=True, description="Whether one answer may contain several tool calls."
    )
    separate_reasoning: bool | None = Field(
        default=True, description="Return the reasoning as `reasoning_content`, not as part of the content. Null: true."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables of the model's chat template."
    )
    add_generation_prompt: bool | None = Field(
        default=True, description="Append the beginning of the assistant's message to the prompt."
    )
    continue_final_message: bool | None = Field(
        default=False, description="Continue the last message instead of beginning a new one."
    )
    # OpenAI's fields that do not affect the answer, except `reasoning_effort`
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted without effect.")
    service_tier: Text | None = Field(default=None, description="Accepted without effect.")
    safety_identifier: Text | None = Field(default=None, description="Accepted without effect.")
    prompt_cache_key: Text | None = Field(
        default=None,
        description="The routing policy `consistent_hash` sends requests with the same key to the same replica. Cached "
        "prefixes are found by their content.",
    )
    prompt_cache_retention: Text | None = Field(default=None, description="Accepted without effect.")
    reasoning_effort: Text | None = Field(
        default=None, description="Value of the variable `reasoning_effort` of the chat template."
    )
    verbosity: Text | None = Field(default=None, description="Accepted without effect.")
    modalities: list[Literal["text"]] | None = Field(
        default=None, description="Accepted without effect: answers are always text."
    )
    store: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None


class CompletionRequest(SamplingFields):
    """Prompts to complete."""

    known_at: ClassVar[str | None] = "/v1/completions"

    prompt: PromptsField = Field(description="Text or token ids, one prompt or several.")
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=16, description="Maximum number of tokens to generate."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        default=None,
        description="Return the log-probabilities of the output's tokens, and of this number of the most likely "
        "tokens at each position. Null: none.",
    )
    reasoning_end: ReasoningEnd = None
    reasoning_begin: ReasoningBegin = None
    echo: bool | None = Field(default=False, description="Return the prompt at the start of the text.")
    best_of: Annotated[int, Field(ge=1, le=128), WHOLE] | None = Field(
        default=None, description="Accepted only if it equals `n`."
    )


class EmbeddingRequest(OpenAIModel):
    """Texts to embed."""

    known_at: ClassVar[str | None] = "/v1/embeddings"

    input: PromptsField = Field(description="Text or token ids, one input or several.")
    model: Text | None = Field(default=None, description="The model's name. Null: the served model.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default="float",
        description="Encoding of the vectors. `float`: lists of numbers. `base64`: little-endian float32 in base64.",
    )
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=None,
        description="Return only this number of elements at the start of each vector, for models that are trained for "
        "it. Null: all elements.",
    )
    user: IgnoredText = None
    truncate_prompt_tokens: _Truncation = None
    pooling: Literal["mean", "last"] | None = Field(
        default=None,
        description="How the hidden states of the tokens become one vector. `mean`: the mean of the final hidden "
        "states. `last`: the last token's final hidden state. Null: the checkpoint's setting, or the "
        "mean.",
    )
    normalize: bool | None = Field(
        default=None, description="Scale vectors to unit length. Null: the checkpoint's setting, or true."
    )
    cache_salt: CacheSalt = None
    priority: Priority = 0


class TokenizeRequest(OpenAIModel):
    """A text or a chat to convert to token ids."""

    known_at: ClassVar[str | None] = "/v1/tokenize"

    model: Text | None = Field(default=None, description="The model's name. Null: the served model.")
    prompt: OneOrMany[Text] | None = Field(
        default=None, description="A text, or a list of texts. The answer to a list contains lists."
    )
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="A chat, instead of a text."
    )
    add_special_tokens: bool | None = Field(
        default=True, description="Add the special tokens with which the model's prompts begin."
    )
    add_generation_prompt: bool | None = Field(
        default=True, description="Append the beginning of the assistant's message to the prompt."
    )
    continue_final_message: bool | None = Field(
        default=False, description="Leave the last message open, so that the answer continues it."
    )
    tools: ToolsField | None = Field(default=None, description="Functions that the chat's prompt describes.")
    tool_choice: ToolChoiceField | None = Field(default=None, description="As in /v1/chat/completions.")
    reasoning_effort: Text | None = Field(default=None, description="As in /v1/chat/completions.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables of the model's chat template."
    )

    def chat(self) -> ChatRequest:
        """Return a request for an answer to the chat; `messages` must be set."""
        return ChatRequest.model_construct(**{name: getattr(self, name) for name in _OF_CHATS})


#: Fields of a TokenizeRequest that a ChatRequest has too.
_OF_CHATS: Final = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template_kwargs",
)


class DetokenizeRequest(OpenAIModel):
    """Token ids to convert to text."""

    known_at: ClassVar[str | None] = "/v1/detokenize"

    model: Text | None = Field(default=None, description="The model's name. Null: the served model.")
    tokens: PromptIds = Field(description="Token ids.")
    skip_special_tokens: bool | None = Field(default=True, description="Leave special tokens out of the text.")
