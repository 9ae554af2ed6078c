"""One answer as it comes: which tokens came when."""

from collections.abc import Sequence
from itertools import pairwise

from graftlm.bench.apis import Event

__all__ = ["Answer"]


class Answer:
    """Takes the events of an answer in as they arrive.

    A chunk is what one read of the socket brought, if it holds a new token: events that the client received together
    have no gap between them that it could measure. New tokens show as text, as a growing count, or, when the model
    wrote nothing that can be seen, as the count at the end.

    Attributes:
        moments_s: when each chunk came.
        prompt_tokens, cached_tokens, output_tokens: the last ones that the server told.
        finish_reason, error: set at the end.
    """

    def __init__(self) -> None:
        self.moments_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._chunk_tokens: list[int] = []
        #: Tokens that chunks account for; None once text came without a count beside it.
        self._num_counted: int | None = 0

    def take(self, events: Sequence[Event], now_s: float) -> None:
        """Take in what one read brought."""
        num_before = self._num_counted
        shows_tokens = False
        for event in events:
            shows_tokens |= self._take(event)
        if shows_tokens:
            self.moments_s.append(now_s)
            if num_before is not None and self._num_counted is not None:
                self._chunk_tokens.append(self._num_counted - num_before)

    @property
    def chunk_tokens(self) -> list[int] | None:
        """How many tokens each chunk brought; None when the server does not count as it goes."""
        return None if self._num_counted is None else self._chunk_tokens

    @property
    def gaps_s(self) -> list[float]:
        """The time between chunks."""
        return [after - before for before, after in pairwise(self.moments_s)]

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token after the first chunk; None when nothing came after it, or nobody counted."""
        if len(self.moments_s) < 2 or self.output_tokens is None:
            return None
        num_first = 1 if self.chunk_tokens is None else self.chunk_tokens[0]
        num_later = self.output_tokens - num_first
        return (self.moments_s[-1] - self.moments_s[0]) / num_later if num_later > 0 else None

    def _take(self, event: Event) -> bool:
        """Take in one event; returns whether it shows a new token."""
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
