"""The updates that the scheduler reports about requests."""

from dataclasses import dataclass
from enum import Enum

import msgspec

from graftlm.scheduling.request import CompletionId, Request
from graftlm.types import FinishReason, TokenLogprob, Usage

__all__ = ["Failure", "Finish", "RequestUpdate"]


class Failure(str, Enum):
    """Why a request has failed."""

    REQUEST = "request"  # it is invalid or cannot be served
    GRAMMAR = "grammar"  # its grammar was refused when it was compiled
    ENGINE = "engine"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended.

    Attributes:
        matched_stop: the stop string or token id, for "stop".
        error: what failed, for "error"; why, for "abort".
        failure: set for "error", and for "abort" when its time was over.
    """

    reason: FinishReason
    matched_stop: str | int | None = None
    error: str | None = None
    failure: Failure | None = None


# One is made for every token, and an engine keeps those of a list of prompts until they are asked for: the garbage
# collector need not look through them, since nothing in them refers back.
class RequestUpdate(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one request. Travels between processes as it is.

    Attributes:
        token_ids: generated since the last update.
        num_dropped: how many of the latest tokens reported before they replace, since a tokenizer spells what a grammar
            forced in other tokens together with what came before.
        forced_text: what the text gains by such a change, which takes nothing of it away.
        logprobs: one per token when asked for.
        prompt_logprobs: of further prompt positions, when asked for.
        finish, usage: set on the request's last update.
        queue_s, first_token_s, total_s: seconds from arrival to admission, first sample, end.
        embedding: float32 [hidden] as bytes, on the last update of a request that asked for one.
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
        """Report on a request as it stands."""
        arrival_s, admitted_s = request.arrival_s, request.admitted_s
        first_token_s, finished_s = request.first_token_s, request.finished_s
        # By position: there is one for every token, and names make it four times as slow.
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
