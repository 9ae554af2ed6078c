"""What is known of one request that was made."""

from dataclasses import dataclass

__all__ = ["Failure", "RequestRecord"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed.

    Attributes:
        kind: "http 429" and so on, "connect", "disconnect", "timeout" or "stream".
        message: the server's or the system's own words.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Moments are in seconds since the measurement began, durations in seconds.

    Attributes:
        index: its place among the arrivals.
        scheduled_s: when it should have been sent; None: when it could.
        sent_s: when it was.
        end_s: when its answer was complete, or it failed.
        ttft_s: from being sent until the first chunk.
        last_token_s: from being sent until the last chunk.
        e2e_s: from being sent until the answer was complete.
        tpot_s: of a token after the first chunk, in the mean.
        asked_tokens: output tokens it asked for at most.
        prompt_tokens, cached_tokens, output_tokens: by the server's count; None: it did not say.
        num_chunks: times at which the client received new tokens; what came by one read is one chunk.
        gaps_s: between chunks.
        chunk_tokens: of each chunk; None: the server does not count as it goes.
        finish_reason: in the server's words.
        failure: None when the answer is complete.
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
        """How long it waited in the client past its time."""
        return None if self.scheduled_s is None else self.sent_s - self.scheduled_s
