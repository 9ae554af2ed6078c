"""Drafts from a draft head, which reads the served model's hidden states."""

from collections.abc import Sequence

from graftlm.contracts import Draft, Drafter, DraftHeadBatch, DraftHeads, DraftRequest

__all__ = ["HeadDrafter"]


class HeadDrafter(Drafter):
    """A drafter that runs a draft head on all requests together.

    Args:
        head: the engine's draft head.
        max_drafts: maximum length of a draft in tokens.
    """

    def __init__(self, head: DraftHeads, max_drafts: int) -> None:
        self._head = head
        self._max_drafts = max_drafts

    @property
    def is_expensive(self) -> bool:
        """Always true: a draft runs a network."""
        return True

    @property
    def drafts_ahead(self) -> bool:
        """Always false: a draft needs the hidden states of the latest step."""
        return False

    @property
    def num_page_tokens(self) -> int:
        """Number of drafted tokens, whose keys and values are written to the request's pages."""
        return self._max_drafts

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Return the head's greedy continuation of each request; None if a hidden state is missing."""
        asked = [i for i, request in enumerate(requests) if len(request.token_ids) > 1]
        drafts: list[Draft | None] = [None] * len(requests)
        if not asked:
            return drafts
        chosen = [requests[i] for i in asked]
        found = self._head.run(DraftHeadBatch.of((r.row, r.token_ids, min(r.limit, self._max_drafts)) for r in chosen))
        for i, token_ids, probabilities in zip(asked, found.token_ids, found.probabilities, strict=True):
            num_drafted = int((probabilities > 0).sum())
            if num_drafted:
                confidence = min(1.0, float(probabilities[:num_drafted].mean()))
                drafts[i] = Draft(token_ids[:num_drafted], confidence)
        return drafts
