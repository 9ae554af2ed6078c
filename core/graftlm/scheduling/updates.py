"""The updates that the scheduler reports about requests."""

from dataclasses import dataclass
from enum import Enum

import msgspec

from graftlm.scheduling.request import CompletionId, Request
from graftlm.types import FinishReason, TokenLogprob, Usage

__all__ = ["Failure", "Finish", "RequestUpdate"]


class Failure(str, Enum):
    """The kind of a request's failure."""

    REQUEST = "request"  # the request is invalid or cannot be served
    GRAMMAR = "grammar"  # the request's grammar was refused when it was compiled
    ENGINE = "engine"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Finish:
    """The reason why a request ended.

    A request's last update contains it.

    Attributes:
        matched_stop: the stop string or token id, for "stop".
        error: description of the failure for "error", or of the reason for "abort".
        failure: kind of failure for "error", and for an "abort" because of the request's timeout.
    """

    reason: FinishReason
    matched_stop: str | int | None = None
    error: str | None = None
    failure: Failure | None = None


# One object is created for every token, and an engine stores the updates of a list of prompts until they are read.
# `gc=False`: the garbage collector does not scan updates, because they are never in a reference cycle.
class RequestUpdate(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one request. Processes send it to each other unchanged.

    Attributes:
        token_ids: tokens generated since the last update.
        num_dropped: number of previously reported tokens that `token_ids` replace. Jump-forward encodes forced text
            together with the text before it, which may change the latest tokens.
        forced_text: the text that jump-forward adds with this update; a replacement of tokens removes no text.
        logprobs: one entry per token if requested.
        prompt_logprobs: log-probabilities of further prompt positions if requested.
        finish, usage: set in the request's last update.
        queue_s, first_token_s, total_s: seconds from arrival to the first admission, the first token and the end; None
            before the event.
        embedding: float32 [n] as bytes, the prompt's vector in the last update of a pooling request.
    """

    request_id: CompletionId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    cached_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    num_retractions: int = 0
    embedding: bytes | None = None
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    num_dropped: int = 0
    forced_text: str = ""

    @classmethod
    def of(
        cls,
        request: Request,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        finish: Finish | None = None,
        embedding: bytes | None = None,
        num_dropped: int = 0,
        forced_text: str = "",
    ) -> "RequestUpdate":
        """Create an update with a request's current timings and counts."""
        arrival_s, admitted_s = request.arrival_s, request.admitted_s
        first_token_s, finished_s = request.first_token_s, request.finished_s
        # Positional arguments: an update is created for every token, and keyword arguments would take four times as
        # long.
        return cls(
            request.request_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            finish,
            None if finish is None else request.usage,
            request.cached_tokens,
            None if admitted_s is None else admitted_s - arrival_s,
            None if first_token_s is None else first_token_s - arrival_s,
            None if finished_s is None else finished_s - arrival_s,
            request.num_retractions,
            embedding,
            request.cached_host_tokens,
            request.cached_storage_tokens,
            num_dropped,
            forced_text,
        )
