"""Gets drafts from the drafters, and chooses the number of tokens to verify."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from graftlm.contracts import Draft, Drafter, DraftRequest
from graftlm.records import CacheEvent
from graftlm.speculation.acceptance import Acceptance
from graftlm.speculation.draft_allowance import DraftAllowance
from graftlm.speculation.draft_budget import DraftBudget
from graftlm.speculation.step_costs import StepCosts
from graftlm.types import TokenIds

__all__ = ["DraftCounts", "SourcedDraft", "Speculator"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourcedDraft:
    """A checked draft, with the name of its drafter.

    Attributes:
        drafter: name of its drafter.
        token_ids: int32 [n], at least one token.
        confidence: see `Draft`.
        is_expected: whether the draft is an estimate of a later draft; its token ids then have no meaning.
    """

    drafter: str
    token_ids: TokenIds
    confidence: float
    is_expected: bool = False


#: Estimates for a request without a previous draft, and for one whose drafter had no draft last time.
_FIRST_DRAFT: Final = SourcedDraft("", np.zeros(4, dtype=np.int32), 0.5)
_NO_DRAFT: Final = SourcedDraft("", np.zeros(1, dtype=np.int32), 0.2)


@dataclass(frozen=True, slots=True)
class _Guess:
    """The first token of a draft.

    Attributes:
        drafter, confidence: see `SourcedDraft`.
        token_id: the token.
        place: index of the token in the request.
    """

    drafter: str
    confidence: float
    token_id: int
    place: int


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Totals since the start.

    Attributes:
        drafted: number of drafted tokens that a step verified.
        accepted: number of accepted tokens that became output.
    """

    drafted: int = 0
    accepted: int = 0


class Speculator:
    """Calls an engine's drafters in order. A drafter is called for requests for which earlier drafters had no draft.

    If a drafter fails for a request, it is not called for this request again. If it fails to process an event of the
    prefix cache, it is not called again at all. An expensive drafter is called often only
    while its drafts save more time than its calls take. Otherwise rare calls measure whether this has changed.

    Args:
        drafters: name -> drafter, in order.
        max_drafts: maximum length of a draft in tokens.
        vocab_size: number of tokens in the vocabulary.
        budget: chooses the lengths of drafts; None: a budget that uses the measured costs of steps.
        clock: function that returns seconds, to measure the time of expensive drafters.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        max_drafts: int,
        vocab_size: int,
        budget: DraftBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = StepCosts()
        self.max_drafts = max_drafts
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size
        self._budget = DraftBudget(self.costs, max_drafts) if budget is None else budget
        self._acceptance = Acceptance()
        self._failed: dict[int, set[str]] = {}  # row -> names of failed drafters
        self._open: set[int] = set()
        #: (drafter, row) -> the previous draft of a drafter whose `drafts_ahead` is False; None: it had no draft.
        self._previous: dict[tuple[str, int], SourcedDraft | None] = {}
        self._guesses: dict[int, _Guess] = {}  # row -> the first token of a draft that was not verified
        self._counts = {name: DraftCounts() for name in drafters}
        self._clock = clock
        self._allowances = {name: DraftAllowance() for name, drafter in drafters.items() if drafter.is_expensive}
        self._saved_s = 0.0  # seconds saved per accepted token, from the latest step
        self._added_s = 0.0  # seconds added per drafted token, from the latest step

    @property
    def counts(self) -> dict[str, DraftCounts]:
        """Totals since the start, by drafter."""
        return dict(self._counts)

    def cache_event(self, event: CacheEvent) -> None:
        """Pass an event of the prefix cache to the drafters."""
        for name, drafter in list(self._drafters.items()):
            try:
                drafter.cache_event(event)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # the code of a plugin; a panic in Rust is no `Exception`
                del self._drafters[name]
                _logger.exception("drafter %r failed to process a cache event; it is not called again", name)

    def may_pay(self, num_rows: int) -> bool:
        """Return whether drafts could save time in a step of `num_rows` requests, before any drafter is called."""
        return self._budget.may_pay(num_rows)

    @property
    def num_page_tokens(self) -> int:
        """Number of tokens after each request's latest token for which drafters need slots."""
        return max((drafter.num_page_tokens for drafter in self._drafters.values()), default=0)

    def propose(self, requests: Sequence[DraftRequest], *, in_flight: bool = False) -> dict[int, SourcedDraft]:
        """Return row -> draft for the requests for which a drafter has a draft.

        Args:
            in_flight: whether a step is in flight. Drafters whose `drafts_ahead` is False are then not called; a draft
                like the request's previous one is returned instead.
        """
        found: dict[int, SourcedDraft] = {}
        self._judge_guesses(requests)
        for name, drafter in self._drafters.items():
            asked = [r for r in requests if r.row not in found and name not in self._failed.get(r.row, ())]
            allowance = self._allowances.get(name)
            if not asked or (allowance is not None and not allowance.may_ask):
                continue
            if in_flight and not drafter.drafts_ahead:
                found |= {request.row: self._expected(name, request) for request in asked}
                continue
            self._open.update(request.row for request in asked)
            start = 0.0 if allowance is None else self._clock()
            drafts = self._ask(name, drafter, asked)
            if not drafter.drafts_ahead:
                self._previous.update({(name, r.row): drafts.get(r.row) for r in asked})
            found |= drafts
            if allowance is not None:
                allowance.spend(self._clock() - start)
        for request in requests:
            if (draft := found.get(request.row)) is not None and not draft.is_expected:
                token_id, place = int(draft.token_ids[0]), len(request.token_ids)
                self._guesses[request.row] = _Guess(draft.drafter, draft.confidence, token_id, place)
        return found

    def choose(self, num_rows: int, drafts: Mapping[int, SourcedDraft]) -> dict[int, SourcedDraft]:
        """Return row -> the part of its draft that should be verified.

        Args:
            num_rows: number of requests that decode in the step.
        """
        if not drafts:
            return {}
        rates = [self._acceptance.probability(row, d.drafter, d.confidence) for row, d in drafts.items()]
        lengths = self._budget.lengths(num_rows, rates, [len(draft.token_ids) for draft in drafts.values()])
        self._acceptance.fade(
            (row, draft.drafter, draft.confidence)
            for (row, draft), length in zip(drafts.items(), lengths, strict=True)
            if not length
        )
        return {
            row: SourcedDraft(draft.drafter, draft.token_ids[:length], draft.confidence)
            for (row, draft), length in zip(drafts.items(), lengths, strict=True)
            if length
        }

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Add a measured step without prefill; its verified drafts follow with `observe`.

        Args:
            num_rows: number of requests in the step.
            num_tokens: number of tokens in the step; more than `num_rows` if the step has drafts.
            seconds: device time in seconds; 0 if the device does not measure it.
        """
        num_drafted = num_tokens - num_rows
        self.costs.observe(num_tokens, seconds, has_drafts=num_drafted > 0)
        if not self._allowances:
            return
        if seconds <= 0.0:  # without measurements, expensive drafters are not limited
            self._allowances.clear()
            return
        for allowance in self._allowances.values():
            allowance.add_step(seconds)
        if num_drafted:
            plain_s = seconds / float(self.costs.estimate(num_rows, num_drafted)[-1])
            self._saved_s, self._added_s = plain_s / num_rows, (seconds - plain_s) / num_drafted

    def observe(self, row: int, draft: SourcedDraft, num_accepted: int) -> None:
        """Record how many tokens of a verified draft were accepted. A grammar may also be the source of the draft.

        `count_output` counts the accepted tokens that become output.
        """
        num_drafted = len(draft.token_ids)
        self._open.add(row)
        self._guesses.pop(row, None)
        self._acceptance.observe(row, draft.drafter, draft.confidence, num_drafted, num_accepted)
        if (allowance := self._allowances.get(draft.drafter)) is not None:
            allowance.earn(num_accepted * self._saved_s - num_drafted * self._added_s)
        counts = self._counts.get(draft.drafter, DraftCounts())
        self._counts[draft.drafter] = DraftCounts(counts.drafted + num_drafted, counts.accepted)

    def count_output(self, draft: SourcedDraft, num_tokens: int) -> None:
        """Count the tokens of an observed draft that became output."""
        counts = self._counts.get(draft.drafter, DraftCounts())
        self._counts[draft.drafter] = DraftCounts(counts.drafted, counts.accepted + num_tokens)

    def reject(self, row: int, draft: SourcedDraft) -> None:
        """Record a chosen draft as rejected. It was not verified, because its first token is not allowed."""
        self._acceptance.observe(row, draft.drafter, draft.confidence, 1, 0)

    def close(self, row: int) -> None:
        """Remove the state of a request that has left its row."""
        if row not in self._open:
            return
        self._open.discard(row)
        self._acceptance.close(row)
        self._failed.pop(row, None)
        self._guesses.pop(row, None)
        for name, drafter in self._drafters.items():
            self._previous.pop((name, row), None)
            try:
                drafter.close(row)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # the code of a plugin; a panic in Rust is no `Exception`
                _logger.exception("drafter %r failed to close a request", name)

    def _judge_guesses(self, requests: Sequence[DraftRequest]) -> None:
        """Record whether drafts that were not verified begin with the token that was sampled at their place.

        So the acceptance of drafts is known while none is verified.
        """
        for request in requests:
            guess = self._guesses.get(request.row)
            if guess is not None and guess.place < len(request.token_ids):
                is_right = int(request.token_ids[guess.place]) == guess.token_id
                self._acceptance.observe(request.row, guess.drafter, guess.confidence, 1, int(is_right))
                del self._guesses[request.row]

    def _expected(self, name: str, request: DraftRequest) -> SourcedDraft:
        """Return an estimate of a request's next draft, which begins with the token that the step in flight samples."""
        previous = self._previous.get((name, request.row), _FIRST_DRAFT)
        if previous is None:
            previous = _NO_DRAFT
        num_tokens = min(request.limit, len(previous.token_ids) + 1)
        return SourcedDraft(name, np.zeros(num_tokens, dtype=np.int32), previous.confidence, is_expected=True)

    def _ask(self, name: str, drafter: Drafter, requests: Sequence[DraftRequest]) -> dict[int, SourcedDraft]:
        try:
            answers = drafter.propose(requests)
            if len(answers) != len(requests):
                raise ValueError(f"propose() returned {len(answers)} entries for {len(requests)} requests")
            checked = [self._checked(request, draft) for request, draft in zip(requests, answers, strict=True)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the code of a plugin; a panic in Rust is no `Exception`
            # Calls with one request each find the request that causes the failure.
            if len(requests) > 1:
                return {row: draft for r in requests for row, draft in self._ask(name, drafter, [r]).items()}
            self._failed.setdefault(requests[0].row, set()).add(name)
            _logger.warning(
                "drafter %r failed; the request continues without drafts of this drafter: %s: %s",
                name,
                type(error).__name__,
                error,
            )
            return {}
        return {
            request.row: SourcedDraft(name, token_ids, draft.confidence)
            for request, draft, token_ids in zip(requests, answers, checked, strict=True)
            if draft is not None and token_ids is not None
        }

    def _checked(self, request: DraftRequest, draft: Draft | None) -> TokenIds | None:
        """Return a draft's tokens, cut to the request's limit; None if there is no token.

        Raises:
            TypeError, ValueError: the draft is invalid.
        """
        if draft is None:
            return None
        if not isinstance(draft, Draft):
            raise TypeError(f"propose() returned {type(draft).__name__}, expected Draft or None")
        token_ids = np.asarray(draft.token_ids)
        if token_ids.ndim != 1 or token_ids.dtype != np.int32:
            raise TypeError(f"a draft is {token_ids.dtype} {list(token_ids.shape)}, expected int32 [n]")
        if not 0.0 <= draft.confidence <= 1.0:
            raise ValueError(f"a draft's confidence is {draft.confidence}, expected 0 to 1")
        token_ids = token_ids[: request.limit].copy()  # a copy, because the drafter may reuse its array
        if len(token_ids) and (token_ids.min() < 0 or token_ids.max() >= self._vocab_size):
            raise ValueError(f"a draft has tokens outside the vocabulary of {self._vocab_size}")
        return token_ids if len(token_ids) else None
