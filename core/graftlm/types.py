"""Data types for users and plugins: outputs, messages, id types."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graftlm.sampling_params import SamplingParams

__all__ = [
    "ClassificationOutput",
    "Completion",
    "EmbeddingOutput",
    "FinishReason",
    "Message",
    "PageId",
    "PageIds",
    "PromptLogprobs",
    "RequestId",
    "RequestOutput",
    "SamplingParams",
    "SlotId",
    "SlotIds",
    "Timings",
    "TokenId",
    "TokenIds",
    "TokenLogprob",
    "Usage",
]

TokenId = NewType("TokenId", int)
PageId = NewType("PageId", int)
SlotId = NewType("SlotId", int)
RequestId = NewType("RequestId", str)

TokenIds: TypeAlias = NDArray[np.int32]
PageIds: TypeAlias = NDArray[np.int32]
SlotIds: TypeAlias = NDArray[np.int64]

#: One chat message: {"role": "user", "content": "..."}.
Message: TypeAlias = Mapping[str, Any]


class FinishReason(str, Enum):
    """The reason why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probabilities of one token and of the most likely tokens, from the model's unmodified logits.

    Attributes:
        top: pairs (token id, log-probability) of the most likely tokens, most likely first.
        requested: log-probabilities of `SamplingParams.logprob_token_ids` in place of this token, in their order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    requested: tuple[float, ...] = ()


#: One entry per prompt token; the first entry is None, because the first token has no predecessor.
PromptLogprobs: TypeAlias = tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        cached_tokens: number of prompt tokens that were reused from the prefix cache.
        cached_host_tokens, cached_storage_tokens: numbers of `cached_tokens` that were loaded from host memory and
            from storage.
        jump_forward_tokens: number of completion tokens that the grammar forced, and that were not sampled.
        drafted_tokens: number of drafted tokens that a step verified.
        accepted_draft_tokens: number of drafted tokens that were accepted and became output.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    jump_forward_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0

    @property
    def cached_tokens_by_tier(self) -> dict[str, int]:
        """Numbers of cached tokens by tier: "device", "host" and "storage"."""
        lower = {"host": self.cached_host_tokens, "storage": self.cached_storage_tokens}
        return {"device": self.cached_tokens - sum(lower.values())} | lower

    @property
    def total_tokens(self) -> int:
        """Number of tokens of prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a request's events, in seconds since its arrival; None before the event.

    Attributes:
        queue_s: time until the request's first admission.
        first_token_s: time until its first token.
        total_s: time until it finished.
    """

    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One of a request's `n` completions.

    Attributes:
        matched_stop: the stop string or token id that ended the completion; None if none did.
        error: the error if `finish_reason` is "error".
        logprobs: one entry per token if requested, else None.
        jump_forward_tokens: number of tokens that the grammar forced, and that were not sampled.
        drafted_tokens, accepted_draft_tokens: see `Usage`; set when the completion has ended.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    jump_forward_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's output so far. `text`, `token_ids` and similar properties are those of its first completion.

    Attributes:
        prompt_logprobs: one entry per prompt token if requested, else None. The entries of the first token and of
            tokens before `prompt_logprobs_start` are None.
        unenforced: with `strict=False`, the paths of the JSON schema's keywords that are not enforced.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: PromptLogprobs | None = None
    unenforced: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(c.finish_reason is not None for c in self.completions)

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first completion's token ids."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the first completion ended; None while it runs."""
        return self.completions[0].finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string or token id that ended the first completion; None if none did."""
        return self.completions[0].matched_stop

    @property
    def error(self) -> str | None:
        """The error of the first completion if its `finish_reason` is "error", else None."""
        return self.completions[0].error

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The first completion's log-probabilities if requested, else None."""
        return self.completions[0].logprobs


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """The embedding of a prompt.

    Attributes:
        embedding: float32 [hidden], the pooled final hidden states; float32 [dimensions] if `dimensions` was set.
    """

    request_id: str
    embedding: NDArray[np.float32]
    usage: Usage


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """A prompt's scores from the model's score head.

    Attributes:
        scores: float32 [labels], the unmodified outputs of the head: a classifier's logits, or one reward.
        labels: names of the scores, from config.json's id2label.
    """

    request_id: str
    scores: NDArray[np.float32]
    labels: tuple[str, ...]
    usage: Usage

    @property
    def label(self) -> str:
        """The label with the highest score."""
        return self.labels[int(self.scores.argmax())]
