"""The drafter, which proposes the token that last followed the same tokens in the request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from graftlm.contracts import Draft, Drafter, DraftRequest, Options
from pydantic import Field

__all__ = ["Followers", "FollowersOptions"]

_CONFIDENCE: Final = 0.5


class FollowersOptions(Options):
    """The entries of `speculation.drafter.options` in a configuration."""

    context_tokens: int = Field(
        default=2, ge=1, description="Number of latest tokens for which the next token is looked up."
    )


@dataclass(slots=True)
class _Row:
    """The state of one request.

    Attributes:
        followers: context, a tuple of consecutive token ids -> the token that last followed this context.
        num_read: number of tokens in `followers` so far.
    """

    followers: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_read: int = 0


class Followers(Drafter):
    """A drafter with one table of followers per row, so requests share no tokens. A call reads only new tokens."""

    def __init__(self, options: FollowersOptions) -> None:
        self._context_tokens = options.context_tokens
        self._rows: dict[int, _Row] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Return a draft for each request: the follower of its latest tokens, and the followers after that."""
        return [self._draft(request) for request in requests]

    def close(self, row: int) -> None:
        """Delete the state of a request."""
        self._rows.pop(row, None)

    def _draft(self, request: DraftRequest) -> Draft | None:
        row = self._rows.setdefault(request.row, _Row())
        self._read(row, request)
        context = tuple(request.token_ids[-self._context_tokens :].tolist())
        found: list[int] = []
        while len(found) < request.limit and (follower := row.followers.get(context)) is not None:
            found.append(follower)
            context = (*context[1:], follower)
        return Draft(np.array(found, dtype=np.int32), _CONFIDENCE) if found else None

    def _read(self, row: _Row, request: DraftRequest) -> None:
        """Add the tokens since the last call. They are copied: the request's array is only valid during the call."""
        start = max(0, min(row.num_read, len(request.token_ids)) - self._context_tokens)
        token_ids = request.token_ids[start:].tolist()
        for end in range(self._context_tokens, len(token_ids)):
            row.followers[tuple(token_ids[end - self._context_tokens : end])] = token_ids[end]
        row.num_read = len(request.token_ids)
