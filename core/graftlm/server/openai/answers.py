"""The bodies of answers in OpenAI's formats."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from graftlm.processes.generation import CompletionDelta
from graftlm.types import FinishReason, Usage

__all__ = [
    "AnswerMessage",
    "CalledFunction",
    "Chat",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatLogprobs",
    "Completion",
    "CompletionChoice",
    "CompletionTokens",
    "ContentToken",
    "Delta",
    "DocumentBody",
    "EmbeddingBody",
    "EmbeddingList",
    "EmbeddingUsage",
    "FunctionDelta",
    "ModelCard",
    "ModelList",
    "PromptText",
    "RankedDocument",
    "Ranking",
    "ScoreBody",
    "ScoreList",
    "ScoreUsage",
    "TokenBody",
    "TokenList",
    "TokenText",
    "ToolCallBody",
    "ToolCallPart",
    "UsageBody",
    "encode",
    "finish_name",
    "new_id",
    "new_item_id",
    "now_s",
    "shows",
    "sum_usage",
    "unenforced_of",
]

encode = msgspec.json.Encoder().encode

Unenforced: TypeAlias = Annotated[
    Sequence[str] | msgspec.UnsetType,
    msgspec.Meta(description="Keywords of a JSON schema that are not enforced, with their paths; only without strict."),
]


class CachedTokens(msgspec.Struct, frozen=True):
    """The number of prompt tokens whose keys and values were reused, in total and by tier."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


class CompletionDetails(msgspec.Struct, frozen=True):
    """Counts of the answer's tokens by the way in which they were generated.

    Attributes:
        jump_forward_tokens: number of tokens that a grammar forced and that were not sampled.
        drafted_tokens: number of tokens that were drafted and verified.
        accepted_draft_tokens: number of the answer's tokens that were drafted.
    """

    jump_forward_tokens: int
    drafted_tokens: int
    accepted_draft_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """The token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class TokenBody(msgspec.Struct, frozen=True):
    """A token of a chat's answer, as text and as UTF-8 bytes. The bytes may be only a part of a character."""

    token: str
    logprob: float
    bytes: Sequence[int]


class ContentToken(TokenBody, frozen=True):
    """A sampled token, and the most likely tokens at its position."""

    top_logprobs: Sequence[TokenBody]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The tokens of a chat's answer, or of its new part."""

    content: Sequence[ContentToken]
    refusal: None = None


class CompletionTokens(msgspec.Struct, frozen=True):
    """The tokens of a completion, or of its new part. A prompt's first token has no log-probability."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Annotated[
        Sequence[dict[str, float] | None],
        msgspec.Meta(description="The most likely tokens at each position: text -> log-probability."),
    ]
    text_offset: Annotated[
        Sequence[int], msgspec.Meta(description="The offset of each token in the text, in characters.")
    ]


class CalledFunction(msgspec.Struct, frozen=True):
    """The function that the client should call. Its arguments are the text of a JSON object."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct, frozen=True):
    """A call that the client should make."""

    id: str
    function: CalledFunction
    type: str = "function"


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The name of a function, or more of its arguments."""

    name: str | None = None
    arguments: str


class ToolCallPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new part of a call. The first part of each call has its id and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct, frozen=True):
    """The new part of a chat's answer. `reasoning_content` is always present, since some clients require it."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | None = None
    tool_calls: Sequence[ToolCallPart] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """The new part of one of a chat's answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    unenforced: Unenforced = msgspec.UNSET


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's message, which the client may send back unchanged."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: Sequence[ToolCallBody] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One of a chat's answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | None


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to a chat."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: UsageBody
    unenforced: Unenforced = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion, or its new part."""

    index: int
    text: str
    logprobs: CompletionTokens | None = None
    finish_reason: str | None = None
    matched_stop: str | int | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A list of completions, or an event of a stream of completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    unenforced: Unenforced = msgspec.UNSET


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one text: a list of numbers, or float32 bytes in base64."""

    object: str = "embedding"
    index: int
    embedding: Sequence[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Token counts of embeddings."""

    prompt_tokens: int
    total_tokens: int


class ScoreUsage(EmbeddingUsage, frozen=True):
    """Token counts of scores; nothing is generated."""

    completion_tokens: int = 0


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the texts."""

    object: str = "list"
    data: Sequence[EmbeddingBody]
    model: str
    usage: EmbeddingUsage


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair of texts."""

    object: str = "score"
    index: int
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A list of scores. Scores of pairs are in `data`. Scores of items for a query are in `scores`, one per label."""

    id: str
    object: str
    created: int
    model: str
    usage: ScoreUsage
    data: Sequence[ScoreBody] | None = None
    scores: Sequence[Sequence[float]] | None = None


class DocumentBody(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a document, as the client sent it."""

    text: str


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A document's index in the request, and its relevance."""

    index: int
    relevance_score: float
    document: DocumentBody | None = None


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: Sequence[RankedDocument]
    usage: ScoreUsage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model: the checkpoint's model, without or with an adapter."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "graftlm"
    root: Annotated[str, msgspec.Meta(description="The path or name from which it was loaded.")]
    max_model_len: Annotated[int, msgspec.Meta(description="Maximum number of tokens of prompt and answer together.")]
    parent: Annotated[str | None, msgspec.Meta(description="The model to which an adapter belongs.")] = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The served models: the checkpoint's model, and one for each adapter."""

    object: str = "list"
    data: Sequence[ModelCard]


class TokenList(msgspec.Struct, frozen=True):
    """The token ids of a text, or of each text in a list."""

    tokens: Sequence[int | Sequence[int]]
    count: int | Sequence[int]
    max_model_len: int


class TokenText(msgspec.Struct, frozen=True):
    """The text of token ids."""

    text: str


class PromptText(msgspec.Struct, frozen=True):
    """The text of token ids, under SGLang's and vLLM's names."""

    text: str
    prompt: str


def new_id(prefix: str) -> str:
    """Return a random id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def new_item_id(prefix: str) -> str:
    """Return a random id with an underscore, as in OpenAI's responses and Anthropic's messages."""
    return f"{prefix}_{uuid.uuid4().hex}"


def now_s() -> int:
    """Return Unix time in seconds."""
    return int(time.time())


def finish_name(reason: FinishReason | None) -> str | None:
    """Return OpenAI's name of a finish reason. "abort" is not one of OpenAI's names."""
    return None if reason is None else reason.value


def shows(delta: CompletionDelta) -> bool:
    """Return whether a delta has content for the client. It has none if its text may be the start of a stop string."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)


def unenforced_of(names: Sequence[str]) -> Sequence[str] | msgspec.UnsetType:
    """Return the field `unenforced` of an answer; it is unset if everything is enforced."""
    return names or msgspec.UNSET


def sum_usage(usages: Sequence[Usage]) -> UsageBody:
    """Return the sums of the token counts of several prompts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    tiers = [usage.cached_tokens_by_tier for usage in usages] or [Usage().cached_tokens_by_tier]
    by_tier = {tier: sum(counts[tier] for counts in tiers) for tier in tiers[0]}
    details = CompletionDetails(
        sum(usage.jump_forward_tokens for usage in usages),
        sum(usage.drafted_tokens for usage in usages),
        sum(usage.accepted_draft_tokens for usage in usages),
    )
    return UsageBody(prompt, completion, prompt + completion, CachedTokens(cached, by_tier), details)
