"""Records one answer: its tokens and the times of their arrival."""

from collections.abc import Sequence
from itertools import pairwise

from graftlm.bench.apis import Event

__all__ = ["Answer"]


class Answer:
    """A recorder of one answer's events while they arrive.

    A chunk is the data of one read from the socket that contains at least one new token. Events of the same read arrive
    together, so the client cannot measure a gap between them. An event has a new token if it has text or a larger token
    count than before. Tokens without visible text are found only by the count.

    Attributes:
        moments_s: arrival time of each chunk, in seconds of the client's clock.
        prompt_tokens, cached_tokens, output_tokens: the server's latest counts; None: the server sent no count.
        finish_reason, error: the server's values; None before the end of the answer.
    """

    def __init__(self) -> None:
        self.moments_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._chunk_tokens: list[int] = []
        #: number of tokens in the chunks so far; None if an event had text but no count
        self._num_counted: int | None = 0

    def add(self, events: Sequence[Event], now_s: float) -> None:
        """Record the events of one read that ended at `now_s`."""
        num_before = self._num_counted
        has_tokens = False
        for event in events:
            has_tokens |= self._add(event)
        if has_tokens:
            self.moments_s.append(now_s)
            if num_before is not None and self._num_counted is not None:
                self._chunk_tokens.append(self._num_counted - num_before)

    @property
    def chunk_tokens(self) -> list[int] | None:
        """The number of tokens in each chunk; None if the server does not send a count with each event."""
        return None if self._num_counted is None else self._chunk_tokens

    @property
    def gaps_s(self) -> list[float]:
        """The times between consecutive chunks, in seconds."""
        return [after - before for before, after in pairwise(self.moments_s)]

    @property
    def tpot_s(self) -> float | None:
        """The mean time per token after the first chunk, in seconds; None if there are no such tokens or no count."""
        if len(self.moments_s) < 2 or self.output_tokens is None:
            return None
        num_first = 1 if self.chunk_tokens is None else self.chunk_tokens[0]
        num_later = self.output_tokens - num_first
        return (self.moments_s[-1] - self.moments_s[0]) / num_later if num_later > 0 else None

    def _add(self, event: Event) -> bool:
        """Record one event. Return whether it contains a new token."""
        self.error = event.error or self.error
        self.finish_reason = event.finish_reason or self.finish_reason
        if event.prompt_tokens is not None:
            self.prompt_tokens = event.prompt_tokens
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if event.output_tokens is None:
            if event.has_text:
                self._num_counted = None
            return event.has_text
        self.output_tokens = event.output_tokens
        if self._num_counted is None:
            return event.has_text
        is_more = event.output_tokens > self._num_counted
        self._num_counted = event.output_tokens
        return is_more
