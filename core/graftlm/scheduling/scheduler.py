"""Queues requests, plans steps, commits results, and ends requests."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import PrefixCache, SchedulingPolicy
from graftlm.errors import AdapterNotFoundError, GrammarError, NeverFitsError, QueueFullError
from graftlm.memory import KVManager
from graftlm.plan import StepPlan, StepResult
from graftlm.scheduling.committer import Committer
from graftlm.scheduling.compiling_grammars import CompilingGrammars
from graftlm.scheduling.deadlines import Deadlines
from graftlm.scheduling.drafting import Drafting, PlannedDraft
from graftlm.scheduling.forced_drafts import ForcedDrafts
from graftlm.scheduling.forced_output import ForcedOutput
from graftlm.scheduling.jump_forward import JumpForward
from graftlm.scheduling.live_requests import LiveRequests
from graftlm.scheduling.media_feeding import MediaFeeding
from graftlm.scheduling.planner import DraftRows, Planner
from graftlm.scheduling.prefetches import Prefetches
from graftlm.scheduling.queue import WaitingQueue
from graftlm.scheduling.recovery import Recovery
from graftlm.scheduling.request import Request
from graftlm.scheduling.running import RunningRequests
from graftlm.scheduling.step_masks import fill_masks, insert_masks
from graftlm.scheduling.steps_in_flight import StepInFlight, StepsInFlight
from graftlm.scheduling.updates import Failure, Finish, RequestUpdate
from graftlm.speculation import DraftCounts, Speculator
from graftlm.types import FinishReason, TokenIds

__all__ = ["Scheduler", "SchedulerCounters", "SchedulerLimits"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of a step and of the queue.

    Attributes:
        mix_chunks: whether one step may contain both prompt chunks and decode rows.
    """

    max_queued_requests: int
    prefill_tokens_per_step: int
    mix_chunks: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerCounters:
    """Sums since the start."""

    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished_requests: int
    retractions: int
    aged_requests: int
    retracted_tokens: int
    cached_host_tokens: int
    cached_storage_tokens: int
    jump_forward_tokens: int
    drafts: Mapping[str, DraftCounts]


class Scheduler:
    """Plans steps from requests, and converts results of steps to updates. It runs on the host, without tensors.

    A request passes through these owners:

        add -> WaitingQueue -> plan -> RunningRequests -> plan -> StepsInFlight -> commit -> RequestUpdate
               CompilingGrammars      Planner                     fill_mask        Committer
               Prefetches, Deadlines  Drafting                                     ForcedOutput

    `LiveRequests` owns the request from `add` to its end. Steps are committed in the order in which they were planned.
    One step may be planned while another is in flight, unless `must_commit_first` returns True.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: SchedulingPolicy,
        limits: SchedulerLimits,
        clock: Callable[[], float],
        jump_forward: JumpForward | None = None,
        speculator: Speculator | None = None,
        forced_drafts: ForcedDrafts | None = None,
        media: MediaFeeding | None = None,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            clock: monotonic clock in seconds.
            jump_forward: finds the output that a grammar forces; None: all output is sampled.
            speculator: drafts tokens that steps verify; None: each step samples one token per request.
            forced_drafts: drafts output that a grammar forces; it requires `speculator`.
            media: provides the features of pictures; None: requests have no pictures.
        """
        self.kv = kv
        self._limits = limits
        self._clock = clock
        self._in_flight = StepsInFlight()
        self._deadlines = Deadlines()
        self._grammars = CompilingGrammars()
        self._prefetches = Prefetches(kv)
        self._drafting = None if speculator is None else Drafting(speculator, forced_drafts)
        self._media = media
        self._running = RunningRequests(kv, _on_leave(speculator, media))
        self._queue = WaitingQueue(policy, lambda: kv.cache, kv.page_size)
        self._live = LiveRequests(self._running, self._queue, self._grammars, self._prefetches, clock)
        self._planner = Planner(
            kv,
            self._running,
            self._queue,
            limits.prefill_tokens_per_step,
            policy.preemption,
            mix_chunks=limits.mix_chunks,
            media=media,
        )
        self._forced_output = ForcedOutput(
            jump_forward, self._live, self._queue, self._planner, lambda: self._in_flight.num_planned
        )
        self._committer = Committer(kv, self._live, self._running, self._forced_output, self._drafting, clock)
        self._recovery = Recovery(
            kv, self._live, self._running, self._planner, self._prefetches, self._in_flight, media
        )

    @property
    def num_running(self) -> int:
        """Number of requests that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        """Number of steps that are planned and not committed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether there is an unfinished request, an uncommitted step, or an update that was not returned yet."""
        return bool(len(self._live) or len(self._in_flight) or self._live.updates)

    def must_commit_first(self) -> bool:
        """Return whether the step in flight must be committed before the next step is planned.

        This is the case if the step in flight verifies drafts, because the number of accepted tokens is not known
        before. It is also the case if the next step could verify drafts.

        Effects: calls drafters that may draft while a step is in flight.
        """
        step = self._in_flight.first
        if self._drafting is None or step is None:
            return False
        if step.drafts:
            return True
        samples_all = len(step.plan.sample_idx) == len(step.requests) == len(self._running)
        return samples_all and self._drafting.is_worth_waiting(step.requests)

    @property
    def next_deadline_s(self) -> float | None:
        """Clock reading of the next deadline, at which `plan` has work; None without deadlines."""
        owners = self._grammars, self._prefetches
        deadlines = [self._deadlines.next_s, *[owner.next_deadline_s for owner in owners]]
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    @property
    def used_adapter_slots(self) -> Counter[int]:
        """Number of unfinished requests per adapter slot; requests without an adapter are not counted."""
        return self._live.used_adapter_slots

    @property
    def counters(self) -> SchedulerCounters:
        """Sums since the start."""
        return SchedulerCounters(
            steps=self._in_flight.num_planned,
            prompt_tokens=self._live.num_prompt_tokens,
            cached_tokens=self._planner.cached_tokens,
            generated_tokens=self._committer.num_sampled_tokens + self._forced_output.num_tokens,
            finished_requests=self._live.num_finished,
            retractions=self._planner.num_retractions,
            aged_requests=self._queue.num_aged,
            retracted_tokens=self._planner.num_retracted_tokens,
            cached_host_tokens=self._planner.cached_host_tokens,
            cached_storage_tokens=self._planner.cached_storage_tokens,
            jump_forward_tokens=self._forced_output.num_tokens,
            drafts={} if self._drafting is None else self._drafting.speculator.counts,
        )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: max_queued_requests are waiting.
            NeverFitsError: the request needs more pages than the engine has.
            AdapterNotFoundError: the request's adapter was unloaded after the request was made.
        """
        if request.adapter is not None and request.adapter.is_unloaded:
            raise AdapterNotFoundError(f"the adapter {request.adapter.name!r} has been unloaded")
        if len(self._queue) >= self._limits.max_queued_requests:
            raise QueueFullError(
                f"the queue is full: {len(self._queue)} requests are waiting, the maximum set by "
                "scheduling.max_queued_requests. Try again later."
            )
        needed, total = self.kv.pages_for(request.max_len), self.kv.pool.num_pages
        if needed > total:
            raise NeverFitsError(
                f"request {request.request_id}: {request.prompt_len} prompt tokens and up to "
                f"{request.max_new_tokens} more need {needed} KV pages, but the engine has only {total}. Lower "
                "max_tokens or raise memory.kv_tokens."
            )
        self._live.add(request)
        self._deadlines.add(request)

    def abort(self, request_id: str, reason: str) -> bool:
        """End a waiting or running request, and free or cache its pages immediately. Return False if it is unknown."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._live.finish(request, Finish(FinishReason.ABORT, error=reason))
        return True

    def plan(self) -> StepPlan | None:
        """Plan the next step; None if no request can run before a step is committed or a request is added."""
        now = self._clock()
        self._expire(now)
        self._start_grammars(now)
        if self.kv.tiers is not None:
            self.kv.tiers.begin_plan()
            self._prefetches.begin_plan(now)
        drafts: dict[int, PlannedDraft] = {}
        plan = self._planner.plan(self._in_flight.num_planned, now, self._draft_into(drafts))
        self._prefetches.release()
        if plan is None:
            if self._running.requests and not len(self._in_flight):
                self._planner.break_standstill()
            return None
        requests = self._running.at(plan.rows)
        used: dict[int, PlannedDraft] = {}
        if plan.num_drafts is not None:  # the plan may contain shorter or fewer drafts
            planned = zip(plan.rows.tolist(), plan.num_drafts.tolist(), strict=True)
            used = {row: drafts[row].first(num_drafts) for row, num_drafts in planned if num_drafts}
        self._in_flight.add(StepInFlight(plan, requests, used))
        return plan

    def fill_mask(self) -> None:
        """Set the token mask of the first step in flight, if the step needs a mask that is not set yet.

        Call this method after each commit, because the tokens that a grammar allows depend on all earlier tokens.
        """
        step = self._in_flight.first
        if step is None:
            return
        plan, mask = step.plan, step.plan.token_mask
        if mask is None or mask.bits.done():
            return
        masked_idx = plan.sample_idx[mask.idx]
        is_first = np.diff(masked_idx, prepend=-1) != 0  # the masks of requests with drafts are already computed
        sampling = [step.requests[b] for b in masked_idx[is_first].tolist()]
        drafted = [_draft_masks(step, request) for request in sampling]
        grammars = [
            request.grammar if masks is None and request.uses_sample_of(plan.step_id) else None
            for request, masks in zip(sampling, drafted, strict=True)
        ]
        num_words = next(request.grammar.num_words for request in sampling if request.grammar is not None)
        bits, errors = fill_masks(grammars, num_words)
        if len(sampling) < len(masked_idx):
            bits = insert_masks(bits, is_first, drafted)
        mask.bits.set_result(bits)
        for i, error in errors.items():
            self._live.fail(sampling[i], str(error), Failure.REQUEST)

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of the first step in flight.

        Effects: appends tokens, ends finished requests, and caches or frees their pages. Drops tokens of requests that
            ended after the step was planned.

        Returns: every update since the last commit.
        """
        step = self._in_flight.remove_first(plan)
        if plan.copies is not None and self.kv.tiers is not None:
            self.kv.tiers.copies_done(plan.copies)
        elif self._drafting is not None and not plan.num_prefill_tokens and plan.media_work is None:
            self._drafting.speculator.observe_step(len(plan.rows), plan.num_tokens, result.model_s)
        if self._media is not None:
            self._commit_media(self._media, plan, result)
        self._committer.commit(step, result)
        return self.take_updates()

    def fail(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """Drop a step that raised on the device: its requests fail, and all other running requests are queued again.

        Effects: frees the pages of every running request and empties the cache, because prompts are published before
            they are computed. Drops the steps planned after this one, which must have ended.

        Returns: every update since the last commit.
        """
        self._recovery.fail_step(self._in_flight.remove_first(plan).requests, error)
        return self.take_updates()

    def retract_all(self) -> None:
        """Put every running request back into the queue; no step may be in flight."""
        self._recovery.retract_all()

    def restart_memory(self, make_cache: Callable[[], PrefixCache]) -> None:
        """Put running requests back into the queue, and empty the KV memory. No step may be in flight.

        Args:
            make_cache: function that creates a new cache. It is called only if there are lower tiers, because the names
                of blocks in storage depend on the weights. Its errors are raised; see `KVManager.restart`.
        """
        self._recovery.restart_memory(make_cache)

    def release_memory(self) -> None:
        """Put running requests back into the queue, and empty the KV memory on all tiers. No step may be in flight.

        Effects: a cache with lower tiers is closed. In this case, `kv.restart` must succeed before the next `plan`.
        """
        self._recovery.release_memory()

    def recover(self, error: str, make_cache: Callable[[], PrefixCache], *, waiting_too: bool = False) -> None:
        """Continue after a failure of the bookkeeping or of a plugin that it calls. Steps in flight must have ended.

        Effects: the running requests and the request that was being planned fail, because the ownership of pages is no
            longer reliable. The KV memory starts empty with a new cache. Waiting requests stay in the queue.

        Args:
            make_cache: function that creates the new cache, called after the old cache has released its memory. Its
                errors are raised after every request has failed; `kv.restart` must then succeed before the next
                `plan`.
            waiting_too: whether waiting requests fail too, because one of them may be the cause.
        """
        self._recovery.recover(error, make_cache, waiting_too=waiting_too)

    def _commit_media(self, media: MediaFeeding, plan: StepPlan, result: StepResult) -> None:
        media.commit(plan, result)
        if result.media is not None and result.media.errors:
            for request, error in media.failed(result.media, self._running.requests):
                self._live.fail(request, error)

    def expire(self) -> None:
        """End the requests whose deadline has passed; `plan` also does this."""
        self._expire(self._clock())

    def take_updates(self) -> list[RequestUpdate]:
        """Return the updates since the last call."""
        return self._live.take_updates()

    def _draft_into(self, drafts: dict[int, PlannedDraft]) -> DraftRows | None:
        """Return a function that drafts for the next step and stores in `drafts`; None while a step is in flight."""
        drafting = self._drafting
        if drafting is None or len(self._in_flight):
            return None

        def draft(requests: Sequence[Request]) -> dict[int, TokenIds]:
            self._planner.reserve_ahead(requests, drafting.num_page_tokens(len(requests)))
            drafts.update(drafting.draft(requests))
            return {row: found.token_ids for row, found in drafts.items()}

        return draft

    def _expire(self, now: float) -> None:
        for request in self._deadlines.expired(now, len(self._live)):
            reason = f"timed out after {now - request.arrival_s:.3f} s"
            self._live.finish(request, Finish(FinishReason.ABORT, error=reason, failure=Failure.TIMEOUT))

    def _start_grammars(self, now: float) -> None:
        for request, error in self._grammars.start(now):
            if error is None:
                self._forced_output.extend(request, now)
            else:
                failure = Failure.GRAMMAR if isinstance(error, GrammarError) else Failure.REQUEST
                self._live.fail(request, str(error), failure)


def _on_leave(speculator: Speculator | None, media: MediaFeeding | None) -> Callable[[int], None] | None:
    """Return the function to call with each row that a request leaves."""
    if media is None:
        return None if speculator is None else speculator.close
    if speculator is None:
        return media.leave

    def leave(row: int) -> None:
        speculator.close(row)
        media.leave(row)

    return leave


def _draft_masks(step: StepInFlight, request: Request) -> NDArray[np.int32] | None:
    """Return the masks of a request's samples; None if the step has no drafts of the request."""
    draft = None if request.row is None else step.drafts.get(request.row)
    return None if draft is None else draft.masks
