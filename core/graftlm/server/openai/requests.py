"""The bodies of OpenAI's requests, and what we take besides."""

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from graftlm.config.problems import nearest
from graftlm.contracts import MAX_CHOICES
from graftlm.sampling_params import MAX_LOGPROBS
from graftlm.server.errors import MISSPELT
from graftlm.server.known_fields import without_defaults
from graftlm.server.openai.other_names import with_own_names
from graftlm.server.openai.tool_requests import ToolChoiceField, ToolsField
from graftlm.server.wire import (
    MAX_PROMPTS,
    NUMBER,
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
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
]

#: Of an unknown field's name, as far as it is compared with those of known ones.
_MAX_NAME_LEN: Final = 64

#: Unknown fields that are compared with known ones.
_MAX_HINTS: Final = 8

_Id = Annotated[str, Field(min_length=1, max_length=256), UNICODE]
_StopString = Annotated[str, Field(min_length=1, max_length=1024), UNICODE]
_Stops = Annotated[
    Annotated[_StopString, Tag("one")] | Annotated[list[_StopString], Field(max_length=64), Tag("many")],
    Discriminator(one_or_many),
]


def _shape_of_prompts(value: Any) -> str:
    """Tell text, texts, token ids and lists of token ids apart; the first element decides."""
    if not isinstance(value, list):
        return "one"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "many_of_ids"
    return "one_of_ids" if isinstance(first, int | float) else "many"


_Prompts = Annotated[
    Annotated[Text, Tag("one")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("many")]
    | Annotated[PromptIds, Tag("one_of_ids")]
    | Annotated[list[PromptIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("many_of_ids")],
    Discriminator(_shape_of_prompts),
]
_Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2), NUMBER]
_NumTokens: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE]


class OpenAIModel(BaseModel):
    """A JSON object of known fields, each of its own type; null stands for a field's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    #: The path of `known_fields` whose fields are accepted at their defaults; None: unknown fields are errors.
    known_at: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelt(cls, value: Any) -> Any:
        """Refuse an unknown field that is nearly a known one; others are refused without a hint."""
        if cls.known_at is not None and isinstance(value, Mapping):
            value = without_defaults(value, cls.model_fields, cls.known_at)
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = (name for name in value if name not in known) if isinstance(value, Mapping) else ()
        for name in islice(unknown, _MAX_HINTS):
            close = nearest(name[:_MAX_NAME_LEN], known)
            if close is not None:
                raise PydanticCustomError(MISSPELT, "did you mean '{close}'?", {"name": name, "close": close})
        return value


class StreamOptions(OpenAIModel):
    """What a stream holds besides its deltas."""

    known_at: ClassVar[str | None] = "/v1/chat/completions#stream_options"

    include_usage: bool | None = Field(default=False, description="End with an event that holds the token counts.")
    include_obfuscation: bool | None = Field(default=False, description="Accepted; events are not padded.")
    continuous_usage_stats: bool | None = Field(
        default=False, description="Put the token counts so far into every event, as `usage`."
    )


class JsonSchemaFormat(OpenAIModel):
    """A JSON schema, with its name."""

    name: Text
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(
        default=None,
        description="False leaves out of the schema what cannot be enforced, instead of refusing it; null: as the "
        "request's `strict`.",
    )
    description: Text | None = None


class TagStructure(OpenAIModel):
    """A part of an answer that follows a schema or a regular expression, and the texts around it."""

    begin: Text
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="Null: any JSON.")
    regex: Text | None = Field(default=None, description="In place of `schema`.")
    end: Text


class ResponseFormat(OpenAIModel):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Of a `structural_tag`: the parts that may follow a trigger."
    )
    triggers: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Of a `structural_tag`: beginnings of the structures' `begin`."
    )
    at_least_one: bool | None = Field(
        default=None, description="Of a `structural_tag`: the answer starts with a structure."
    )
    stop_after_first: bool | None = Field(
        default=None, description="Of a `structural_tag`: the answer ends after a structure."
    )


class SamplingFields(OpenAIModel):
    """What chats and completions have in common."""

    model: Text | None = Field(default=None, description="The model's name; null: the one that is served.")
    temperature: Annotated[float, Field(ge=0, le=2), NUMBER] | None = Field(
        default=1.0, description="0 takes the most likely token."
    )
    top_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = Field(
        default=1.0, description="Keep the smallest set of tokens whose probability reaches this."
    )
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = Field(default=1, description="Answers per prompt.")
    stop: _Stops | None = Field(default=None, description="Strings that end the output.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = Field(
        default=None, description="Makes sampling reproducible, alone or in any batch."
    )
    frequency_penalty: _Penalty | None = Field(default=0.0, description="Against repeating, per occurrence.")
    presence_penalty: _Penalty | None = Field(default=0.0, description="Against repeating at all.")
    logit_bias: (
        dict[Annotated[int, Field(strict=False, ge=0)], Annotated[float, Field(ge=-100, le=100), NUMBER]] | None
    ) = Field(default=None, description="Token id (as a string) -> number added to its logit.")
    stream: bool | None = Field(default=False, description="Answer by server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    user: Text | None = Field(default=None, description="Accepted; nothing depends on it.")
    # What OpenAI does not have.
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="Keep the k most likely tokens; -1, 0 or null keeps all."
    )
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = Field(
        default=0.0, description="Keep tokens at least this share as likely as the most likely one."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), NUMBER] | None = Field(
        default=1.0, description="Divides the logits of tokens in prompt and output; above 1 discourages them."
    )
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(
        default=0, description="No end before this many tokens."
    )
    stop_token_ids: TokenIdList | None = Field(default=None, description="Tokens that end the output.")
    include_stop_str_in_output: bool | None = Field(default=False, description="Keep the stop string in the text.")
    ignore_eos: bool | None = Field(default=False, description="Go on past the end-of-sequence token.")
    skip_special_tokens: bool | None = Field(default=True, description="Leave special tokens out of the text.")
    json_schema: SchemaField | None = Field(default=None, description="What the output has to follow.")
    regex: Text | None = Field(default=None, description="What the output has to match.")
    ebnf: Text | None = Field(default=None, description="A grammar that the output has to follow.")
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        default=None, description="Strings, one of which the output has to be."
    )
    structural_tag: TextOrObject | None = Field(
        default=None, description="Parts of the output, each to follow a schema from where a trigger begins it."
    )
    strict: bool | None = Field(
        default=None,
        description="Refuse a `json_schema` or `structural_tag` that cannot be enforced in full; false leaves out what "
        "cannot be, and names it in `unenforced`. Null: true. It is also the default of a `response_format` and of "
        "tools without a `strict` of their own; null: true for a `response_format`, false for tools.",
    )
    grammar_backend: Text | None = Field(default=None, description="Which grammar backend enforces it, by name.")
    jump_forward: bool | None = Field(
        default=None,
        description="False samples every token under a grammar, also where the grammar leaves no choice. Null and "
        "true: as the server's `grammar.jump_forward` says.",
    )
    speculation: bool | None = Field(
        default=None,
        description="False drafts no tokens. Null and true: as the server's `speculation` section says. The answer is "
        "the same.",
    )
    logits_processors: LogitsProcessors | None = Field(
        default=None, description="Logits processors that plugins provide, by name, each with its options."
    )
    cache_salt: Annotated[str, Field(max_length=1024), UNICODE] | None = Field(
        default=None, description="Cached prefixes are shared only between requests of one salt."
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None = Field(
        default=0, description="Higher is admitted first and retracted last."
    )
    timeout_s: Annotated[float, Field(gt=0, le=1e9), NUMBER] | None = Field(
        default=None, description="Give up after this many seconds."
    )
    request_id: _Id | None = Field(
        default=None, description="The answer's `id`, for /abort_request; drawn when absent. Also `rid`."
    )
    extra_key: Annotated[str, Field(max_length=1024), UNICODE] | None = Field(
        default=None, description="As `cache_salt`; both together are one salt."
    )
    lora_path: _Id | None = Field(
        default=None, description="The name of a loaded adapter; or name it in `model`, as `model:adapter`."
    )
    return_cached_tokens_details: bool | None = Field(
        default=False, description="Accepted; `usage` always counts the cached tokens by where they were found."
    )
    response_format: ResponseFormat | None = Field(default=None, description="What the answer has to be.")

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: Any) -> Any:
        return with_own_names(value) if isinstance(value, Mapping) else value


class TextPart(OpenAIModel):
    """A piece of a message's text."""

    type: Literal["text", "input_text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.shown is None:
            raise PydanticCustomError("no_text", "a part of a message needs its text")
        return self

    @property
    def shown(self) -> str | None:
        """What the part adds to the message."""
        return self.refusal if self.type == "refusal" else self.text


class OtherPart(BaseModel):
    """A piece of a message that is no text."""

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
    """One turn of a chat. Fields of answers are accepted, so that an answer can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: _Content | None = Field(default=None, description="Text, or a list of parts of type `text`.")
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
        default=None, description="Tokens to generate at most; null: until the context is full."
    )
    logprobs: bool | None = Field(default=False, description="Report log-probabilities of the answer's tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        default=None, description="Also report this many most likely tokens for each place."
    )
    tools: ToolsField | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: ToolChoiceField | None = Field(
        default=None, description="`auto`, `none`, `required`, or the function to be called; null: `auto`."
    )
    parallel_tool_calls: bool | None = Field(default=True, description="Whether one answer may hold several calls.")
    separate_reasoning: bool | None = Field(
        default=True, description="Give reasoning as `reasoning_content`, not as content; null: true."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables of the model's chat template."
    )
    add_generation_prompt: bool | None = Field(default=True, description="Open the assistant's turn.")
    continue_final_message: bool | None = Field(
        default=False, description="Go on with the last message instead of opening a turn."
    )
    # Wishes that change no answer here.
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted; nothing depends on it.")
    service_tier: Text | None = Field(default=None, description="Accepted; nothing depends on it.")
    safety_identifier: Text | None = Field(default=None, description="Accepted; nothing depends on it.")
    prompt_cache_key: Text | None = Field(default=None, description="Accepted; prefixes are found by their content.")
    prompt_cache_retention: Text | None = Field(default=None, description="Accepted; nothing depends on it.")
    reasoning_effort: Text | None = Field(default=None, description="A variable of the chat template.")
    verbosity: Text | None = Field(default=None, description="Accepted; nothing depends on it.")
    modalities: list[Literal["text"]] | None = Field(default=None, description="Answers are text.")
    store: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None


class CompletionRequest(SamplingFields):
    """Prompts to complete."""

    known_at: ClassVar[str | None] = "/v1/completions"

    prompt: _Prompts = Field(description="Text or token ids, one prompt or several.")
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=16, description="Tokens to generate at most."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        default=None, description="Report log-probabilities, of this many most likely tokens too."
    )
    reasoning_end: ReasoningEnd = None
    reasoning_begin: ReasoningBegin = None
    echo: bool | None = Field(default=False, description="Begin the text with the prompt.")
    best_of: Annotated[int, Field(ge=1, le=128), WHOLE] | None = Field(
        default=None, description="Accepted when it equals `n`."
    )


class EmbeddingRequest(OpenAIModel):
    """Texts to embed."""

    known_at: ClassVar[str | None] = "/v1/embeddings"

    input: _Prompts = Field(description="Text or token ids, one or several.")
    model: Text | None = Field(default=None, description="The model's name; null: the one that is served.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default="float", description="`base64`: float32, little-endian."
    )
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="Keep so many of a vector's first numbers; for models trained for it."
    )
    user: Text | None = Field(default=None, description="Accepted; nothing depends on it.")
    pooling: Literal["mean", "last"] | None = Field(
        default=None,
        description="The mean of the final hidden states, or the last token's; null: as the checkpoint says, or the "
        "mean.",
    )
    normalize: bool | None = Field(
        default=None, description="Scale to unit length; null: as the checkpoint says, or yes."
    )
    cache_salt: Annotated[str, Field(max_length=1024), UNICODE] | None = Field(
        default=None, description="Cached prefixes are shared only with requests of the same salt."
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None = Field(
        default=0, description="Higher is admitted first, and retracted last."
    )


class TokenizeRequest(OpenAIModel):
    """A text or a chat to turn into token ids."""

    known_at: ClassVar[str | None] = "/v1/tokenize"

    model: Text | None = Field(default=None, description="The model's name; null: the one that is served.")
    prompt: OneOrMany[Text] | None = Field(default=None, description="A text, or a list; lists are answered by lists.")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="A chat, instead of a text."
    )
    add_special_tokens: bool | None = Field(default=True, description="Begin a text with the model's own tokens.")
    add_generation_prompt: bool | None = Field(default=True, description="Open the assistant's turn.")


class DetokenizeRequest(OpenAIModel):
    """Token ids to turn into text."""

    known_at: ClassVar[str | None] = "/v1/detokenize"

    model: Text | None = Field(default=None, description="The model's name; null: the one that is served.")
    tokens: PromptIds = Field(description="Token ids.")
    skip_special_tokens: bool | None = Field(default=True, description="Leave special tokens out of the text.")
