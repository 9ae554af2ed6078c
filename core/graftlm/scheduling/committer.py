"""Applies a step's result to its requests."""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import RequestError
from graftlm.memory import KVManager
from graftlm.plan import LogprobTable, StepPlan, StepResult
from graftlm.scheduling.drafting import Drafting
from graftlm.scheduling.forced_output import ForcedOutput
from graftlm.scheduling.live_requests import LiveRequests
from graftlm.scheduling.request import Request, RequestStatus
from graftlm.scheduling.running import RunningRequests
from graftlm.scheduling.steps_in_flight import StepInFlight
from graftlm.scheduling.updates import Failure, Finish, RequestUpdate
from graftlm.types import FinishReason, TokenLogprob

__all__ = ["Committer"]

_FINISHED: Final = RequestStatus.FINISHED  # read for every token: a global name is faster than access to an enum member


class Committer:
    """Appends sampled tokens, reports log-probabilities and embeddings, and ends requests that are done.

    Attributes:
        num_sampled_tokens: number of sampled tokens that were appended since the start.
    """

    def __init__(
        self,
        kv: KVManager,
        live: LiveRequests,
        running: RunningRequests,
        forced_output: ForcedOutput,
        drafting: Drafting | None,
        clock: Callable[[], float],
    ) -> None:
        self.num_sampled_tokens = 0
        self._kv = kv
        self._live = live
        self._running = running
        self._forced_output = forced_output
        self._drafting = drafting
        self._clock = clock

    def commit(self, step: StepInFlight, result: StepResult) -> None:
        """Apply a step's result."""
        plan, requests = step.plan, step.requests
        if plan.prompt_spans:
            self._report_prompt_logprobs(plan, requests, result.prompt_logprobs)
        if plan.pool_spans:
            self._commit_pooled(plan, requests, result.pooled)
        if step.drafts:
            self._commit_drafted(step, result)
            return
        now = self._clock()
        token_ids, errors, table = result.token_ids.tolist(), result.errors, result.logprobs
        sampling = requests
        if len(token_ids) != len(requests):
            sampling = tuple([requests[b] for b in plan.sample_idx.tolist()])
        for i, request in enumerate(sampling):
            if request.status is _FINISHED or plan.step_id < request.valid_from_step:  # inlined `uses_sample_of`
                continue
            if i in errors:
                self._fail_untrusted(request, errors[i])
                continue
            logprobs: tuple[TokenLogprob, ...] = ()
            if table is not None and request.params.logprobs is not None:
                num_ids = len(request.params.logprob_token_ids)
                logprobs = (_read_logprob(table, i, token_ids[i], request.params.logprobs, num_ids),)
            self._commit_token(request, token_ids[i], logprobs, now)

    def _commit_drafted(self, step: StepInFlight, result: StepResult) -> None:
        """Apply the samples of a step with drafts. Samples after a rejected draft are dropped."""
        plan, now = step.plan, self._clock()
        token_ids = result.token_ids.tolist()
        idx = plan.sample_idx
        starts = np.flatnonzero(np.diff(idx, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(idx)], strict=True):
            request = step.requests[idx[start]]
            if not request.uses_sample_of(plan.step_id):
                continue
            draft = None if request.row is None else step.drafts.get(request.row)
            drafted = [] if draft is None else draft.token_ids.tolist()
            sampled = token_ids[start:end]
            num_accepted = next((i for i, token_id in enumerate(drafted) if sampled[i] != token_id), len(drafted))
            if draft is None or self._drafting is None:
                self._commit_samples(step, request, start, sampled[:1], result, now)
                continue
            self._drafting.observe(request, draft, num_accepted)
            before = request.accepted_draft_tokens
            self._commit_samples(step, request, start, sampled[: num_accepted + 1], result, now)
            self._drafting.count_output(draft, request.accepted_draft_tokens - before)

    def _commit_samples(
        self, step: StepInFlight, request: Request, start: int, token_ids: list[int], result: StepResult, now: float
    ) -> None:
        """Commit tokens of a request, up to the first token that ends the request or is followed by forced output.

        Args:
            start: index of the first token among the step's S samples.
            token_ids: the accepted drafts and the sample after them.

        Effects: adds the committed drafts to the request's `accepted_draft_tokens`.
        """
        table, row = self._kv.table, request.held_row
        last = start + len(token_ids) - 1
        committed: list[int] = []
        logprobs: list[TokenLogprob] = []
        for i, token_id in enumerate(token_ids, start=start):
            error = result.errors.get(i)
            if error is not None:
                self._report_tokens(request, committed, logprobs)
                self._fail_untrusted(request, error)
                return
            if result.logprobs is not None and request.params.logprobs is not None:
                num_top, num_ids = request.params.logprobs, len(request.params.logprob_token_ids)
                logprobs.append(_read_logprob(result.logprobs, i, token_id, num_top, num_ids))
            request.append(token_id)
            committed.append(token_id)
            if i < last:
                request.accepted_draft_tokens += 1
            self.num_sampled_tokens += 1
            if request.first_token_s is None:
                request.first_token_s = now
            table.computed[row] = request.num_tokens - 1
            table.known[row] = request.num_tokens
            finish = self._finish(request, token_id)
            if finish is not None:
                self._live.finish(request, finish, tuple(committed), tuple(logprobs))
                return
            if request.grammar is not None:
                self._report_tokens(request, committed, logprobs)
                committed, logprobs = [], []
                self._forced_output.extend(request, now)
                if not request.uses_sample_of(step.plan.step_id):
                    return
        self._report_tokens(request, committed, logprobs)

    def _report_tokens(self, request: Request, token_ids: list[int], logprobs: list[TokenLogprob]) -> None:
        if token_ids:
            self._live.updates.append(RequestUpdate.of(request, tuple(token_ids), tuple(logprobs)))

    def _finish(self, request: Request, token_id: int) -> Finish | None:
        """Decide whether a request's latest token, or an error of its grammar, ends the request."""
        try:
            return _finish_after(request, token_id)
        except RequestError as error:
            return Finish(FinishReason.ERROR, error=str(error), failure=Failure.REQUEST)

    def _commit_token(self, request: Request, token_id: int, logprobs: tuple[TokenLogprob, ...], now: float) -> None:
        request.append(token_id)
        self.num_sampled_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now
        if not (request.is_watched or token_id in request.stop_token_ids or request.num_tokens >= request.max_len):
            self._live.updates.append(RequestUpdate.of(request, (token_id,), logprobs))
            return
        finish = self._finish(request, token_id)
        if finish is not None:
            self._live.finish(request, finish, (token_id,), logprobs)
            return
        self._live.updates.append(RequestUpdate.of(request, (token_id,), logprobs))
        if request.grammar is not None:
            self._forced_output.extend(request, now)

    def _report_prompt_logprobs(
        self, plan: StepPlan, requests: tuple[Request, ...], tables: tuple[LogprobTable, ...]
    ) -> None:
        by_row = dict(zip(plan.rows.tolist(), requests, strict=True))
        for span, table in zip(plan.prompt_spans, tables, strict=True):
            request = by_row[span.row]
            if request.status is _FINISHED:
                continue
            targets = span.targets.tolist()
            num_ids = len(span.requested)
            logprobs = tuple([_read_logprob(table, i, targets[i], span.num_top, num_ids) for i in range(len(targets))])
            request.num_reads_reported += len(logprobs)
            self._live.updates.append(RequestUpdate.of(request, prompt_logprobs=logprobs))

    def _commit_pooled(
        self, plan: StepPlan, requests: tuple[Request, ...], pooled: tuple[NDArray[np.float32], ...]
    ) -> None:
        by_row = dict(zip(plan.rows.tolist(), requests, strict=True))
        for span, hidden in zip(plan.pool_spans, pooled, strict=True):
            request = by_row[span.row]
            if request.status is _FINISHED:
                continue
            if not np.isfinite(hidden).all():
                self._fail_untrusted(request, "hidden states are not finite")
                continue
            request.add_pooled(hidden, span.num_tokens)
            if span.is_last:
                self._live.finish(request, Finish(FinishReason.STOP), embedding=request.pooled.tobytes())

    def _fail_untrusted(self, request: Request, error: str) -> None:
        """End a request whose logits or hidden states are not finite, and empty the cache, which contains its prompt.

        The request may have no row: with overlap, a later plan may have retracted it before this step's result arrived.
        """
        if request.row is not None:
            self._running.discard(request)
        self._kv.reset()
        self._live.fail(request, error)


def _finish_after(request: Request, token_id: int) -> Finish | None:
    """Decide whether a request's latest token ends it.

    Raises:
        RequestError: the request's grammar allows no further token, or failed.
    """
    watch, grammar = request.stop_watch, request.grammar
    if watch is not None:
        watch.push((token_id,))
    if grammar is not None and grammar.accept(token_id):
        return Finish(FinishReason.STOP, matched_stop=token_id)
    if token_id in request.stop_token_ids and request.num_output_tokens > request.params.min_tokens:
        return Finish(FinishReason.STOP, matched_stop=token_id)
    if watch is not None and watch.matched is not None:
        return Finish(FinishReason.STOP, matched_stop=watch.matched)
    if request.num_output_tokens >= request.max_new_tokens:
        return Finish(FinishReason.LENGTH)
    return None


def _read_logprob(table: LogprobTable, i: int, token_id: int, num_top: int, num_ids: int) -> TokenLogprob:
    """Return row `i` of a table, with `num_top` most likely tokens and `num_ids` tokens that the request names."""
    pairs = zip(table.top_ids[i, :num_top].tolist(), table.top_logprobs[i, :num_top].tolist(), strict=True)
    top = tuple(pair for pair in pairs if pair[1] != -math.inf)  # a grammar may allow fewer tokens
    requested = () if table.requested is None else tuple(table.requested[i, :num_ids].tolist())
    return TokenLogprob(token_id, float(table.token_logprobs[i]), top, requested)
