"""Drafts tokens for decoding requests, limited to the tokens that their grammars allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import DraftRequest
from graftlm.errors import RequestError
from graftlm.scheduling.forced_drafts import ForcedDrafts
from graftlm.scheduling.request import Request
from graftlm.speculation import SourcedDraft, Speculator
from graftlm.types import TokenIds

__all__ = ["Drafting", "PlannedDraft"]

_NO_MASKS: Final[NDArray[np.int32]] = np.empty((0, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft that a step verifies.

    `Drafting` creates it for the step that is being planned, and receives it again with the number of accepted tokens.

    Attributes:
        source: the draft, cut before the first token that is not allowed.
        masks: int32 [n + 1, ceil(V / 32)], allowed tokens before the draft's n tokens and after each of them; [0, 0]
            without a grammar.
    """

    source: SourcedDraft
    masks: NDArray[np.int32]

    @property
    def token_ids(self) -> TokenIds:
        """The drafted tokens, int32 [n], at least one."""
        return self.source.token_ids

    def first(self, num_tokens: int) -> "PlannedDraft":
        """Return the first `num_tokens` tokens of the draft, with their masks."""
        if num_tokens == len(self.token_ids):
            return self
        source = SourcedDraft(self.source.drafter, self.token_ids[:num_tokens], self.source.confidence)
        return PlannedDraft(source, self.masks[: num_tokens + 1])


class Drafting:
    """Drafts tokens for running requests, and records how many of them are accepted.

    Args:
        speculator: calls the drafters.
        forced: drafts the tokens that grammars force, before the drafters are called. None: forced tokens are not
            drafted.
    """

    def __init__(self, speculator: Speculator, forced: ForcedDrafts | None = None) -> None:
        self.speculator = speculator
        self._forced = forced

    def num_page_tokens(self, num_rows: int) -> int:
        """Return the number of tokens after each request's latest token for which `draft` needs slots."""
        num_tokens = self.speculator.num_page_tokens
        return num_tokens if num_tokens and self.speculator.may_pay(num_rows) else 0

    def draft(self, requests: Sequence[Request]) -> dict[int, PlannedDraft]:
        """Return row -> draft for requests that decode in the step that is being planned.

        Args:
            requests: the requests. No step may be in flight: drafters need the values of all tokens.
        """
        if not self.speculator.may_pay(len(requests)):
            return {}
        by_row = {request.held_row: request for request in requests}
        proposed = self._proposed(requests, 0)
        planned: dict[int, PlannedDraft] = {}
        for row, draft in self.speculator.choose(len(requests), proposed).items():
            found = _cut(by_row[row], draft)
            if found is not None:
                planned[row] = found
            else:
                self.speculator.reject(row, draft)
        return planned

    def is_worth_waiting(self, requests: Sequence[Request]) -> bool:
        """Return whether to commit the step in flight before planning the next one, because drafts could save time.

        Args:
            requests: requests of the step in flight, which samples one token per request. The first token of a draft
                predicts this sample, and the next step could verify the other tokens of the draft.
        """
        if not self.speculator.may_pay(len(requests)):
            return False
        by_row = {request.held_row: request for request in requests if request.row is not None}
        proposed = self._proposed(requests, 1)
        later = {
            row: SourcedDraft(draft.drafter, draft.token_ids[1:], draft.confidence)
            for row, draft in proposed.items()
            if len(draft.token_ids) > 1 and (draft.is_expected or _num_before_stop(by_row[row], draft.token_ids) > 1)
        }
        return bool(self.speculator.choose(len(requests), later))

    def observe(self, request: Request, draft: PlannedDraft, num_accepted: int) -> None:
        """Record how many tokens of a draft were accepted; some of them do not become output if the request ends."""
        request.drafted_tokens += len(draft.token_ids)
        if request.row is not None:
            self.speculator.observe(request.row, draft.source, num_accepted)

    def count_output(self, draft: PlannedDraft, num_tokens: int) -> None:
        """Count the tokens of a draft that became output."""
        self.speculator.count_output(draft.source, num_tokens)

    def _proposed(self, requests: Sequence[Request], num_unknown: int) -> dict[int, SourcedDraft]:
        """Return row -> draft for the requests that may have drafts.

        Args:
            num_unknown: number of tokens that a step in flight samples; the drafts begin with these tokens.
        """
        found: dict[int, SourcedDraft] = {}
        asked: list[DraftRequest] = []
        for request in requests:
            row = request.row
            # A token is also sampled after the last accepted draft, so a draft ends one token before the limit.
            room = request.max_len - request.num_tokens - 1 - num_unknown
            if row is None or room <= 0:
                continue
            limit = min(self.speculator.max_drafts, room) + num_unknown
            forced = None if self._forced is None else self._forced.of(request)
            if forced is not None:
                found[row] = SourcedDraft(forced.drafter, forced.token_ids[:limit], forced.confidence)
            elif request.params.speculation is not False:
                asked.append(DraftRequest(row, request.namespace, request.token_ids, limit))
        return found | self.speculator.propose(asked, in_flight=num_unknown > 0) if asked else found


def _cut(request: Request, draft: SourcedDraft) -> PlannedDraft | None:
    """Return the part of a draft before the first token that stops the request, is forbidden or ends the grammar."""
    token_ids = draft.token_ids[: _num_before_stop(request, draft.token_ids)]
    masks = _NO_MASKS
    if request.grammar is not None and len(token_ids):
        try:
            masks = request.grammar.masks_along(token_ids.tolist())
        except RequestError:
            return None  # if the error occurs again in the step without drafts, it is reported there
        token_ids = token_ids[: len(masks) - 1]
    if not len(token_ids):
        return None
    return PlannedDraft(SourcedDraft(draft.drafter, token_ids, draft.confidence), masks)


def _num_before_stop(request: Request, token_ids: TokenIds) -> int:
    """Return the number of tokens before the first stop token of a request."""
    stops = (i for i, token_id in enumerate(token_ids.tolist()) if token_id in request.stop_token_ids)
    return next(stops, len(token_ids))
