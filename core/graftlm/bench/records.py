"""The record of one measured request."""

from dataclasses import dataclass

__all__ = ["Failure", "RequestRecord"]


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request failed.

    Attributes:
        kind: "http 429" (or another status), "connect", "disconnect", "timeout" or "stream".
        message: the error message of the server or the system.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The measurements of one request. `scheduled_s`, `sent_s` and `end_s` are seconds since the measurement began.

    Attributes:
        index: index in the order of arrival.
        scheduled_s: time at which the request was due; None: no due time.
        sent_s: time at which the request was sent.
        end_s: time at which the answer was complete or the request failed.
        ttft_s: time from sending to the first chunk.
        last_token_s: time from sending to the last chunk.
        e2e_s: time from sending to the end of the answer.
        tpot_s: mean time per token after the first chunk.
        asked_tokens: maximum number of output tokens in the request.
        prompt_tokens, cached_tokens, output_tokens: the server's counts; None: the server sent no count.
        num_chunks: number of chunks; a chunk is the data of one read that contained new tokens.
        gaps_s: times between consecutive chunks.
        chunk_tokens: number of tokens in each chunk; None: the server does not send a count with each event.
        finish_reason: the finish reason that the server sent.
        failure: reason of the failure; None if the answer is complete.
    """

    index: int
    asked_tokens: int
    sent_s: float
    end_s: float
    scheduled_s: float | None = None
    ttft_s: float | None = None
    last_token_s: float | None = None
    e2e_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    num_chunks: int = 0
    gaps_s: list[float] | None = None
    chunk_tokens: list[int] | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def client_queue_s(self) -> float | None:
        """Time from the due time to sending, in seconds; None without a due time."""
        return None if self.scheduled_s is None else self.sent_s - self.scheduled_s
