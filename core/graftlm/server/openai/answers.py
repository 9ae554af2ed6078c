"""The bodies of OpenAI's answers, as they are written."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from graftlm.processes.generation import CompletionDelta
from graftlm.types import FinishReason, Usage

__all__ = [
    "Chat",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "Completion",
    "CompletionChoice",
    "Delta",
    "UsageBody",
    "encode",
    "finish_name",
    "new_id",
    "now_s",
    "shows",
    "sum_usage",
]

encode = msgspec.json.Encoder().encode


class CachedTokens(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those whose keys and values were reused."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of a chat's answer."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one of the answers."""

    index: int
    delta: Delta
    logprobs: Any = None
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


class ChatChoice(msgspec.Struct, frozen=True):
    """One of a chat's answers."""

    index: int
    message: dict[str, Any]
    logprobs: Any
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


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None
    matched_stop: str | int | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Completions, or an event of a stream of them."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


def new_id(prefix: str) -> str:
    """Draw the id of an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now_s() -> int:
    """Return Unix time in seconds."""
    return int(time.time())


def finish_name(reason: FinishReason | None) -> str | None:
    """Return OpenAI's name of a finish reason; "abort" is ours."""
    return None if reason is None else reason.value


def shows(delta: CompletionDelta) -> bool:
    """Whether a client can see that a delta came: text may be held back, being the beginning of a stop string."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)


def sum_usage(usages: Sequence[Usage]) -> UsageBody:
    """Return the token counts of several prompts together."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return UsageBody(prompt, completion, prompt + completion, CachedTokens(cached))
