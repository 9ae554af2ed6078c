"""The life of requests: queued, planned into steps, committed, finished."""

import heapq
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import PrefixCache, SchedulingPolicy
from graftlm.errors import (
    AdapterNotFoundError,
    GrammarError,
    InvariantError,
    NeverFitsError,
    QueueFullError,
    RequestError,
)
from graftlm.memory import KVManager
from graftlm.plan import LogprobTable, StepPlan, StepResult
from graftlm.scheduling.jump_forward import JumpForward
from graftlm.scheduling.planner import Planner
from graftlm.scheduling.queue import WaitingQueue
from graftlm.scheduling.request import Request, RequestStatus
from graftlm.scheduling.running import RunningRequests
from graftlm.scheduling.step_masks import fill_masks
from graftlm.scheduling.updates import Failure, Finish, RequestUpdate
from graftlm.types import FinishReason, TokenLogprob

__all__ = ["Scheduler", "SchedulerCounters", "SchedulerLimits"]

logger = logging.getLogger(__name__)

_FINISHED: Final = RequestStatus.FINISHED  # every token asks for it, and an enum's member takes longer to find


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much a step may hold and how much may wait.

    Attributes:
        mix_chunks: a step may hold prompt chunks and rows that decode.
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


class Scheduler:
    """Turns requests into steps and results into updates. Host side: it never sees a tensor.

    Steps are committed in the order in which they were planned; one may be planned while another is in flight.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: SchedulingPolicy,
        limits: SchedulerLimits,
        clock: Callable[[], float],
        jump_forward: JumpForward | None = None,
    ) -> None:
        """Take what requests share.

        Args:
            jump_forward: finds output that need not be sampled; None samples all.
        """
        self.kv = kv
        self._jump_forward = jump_forward
        self._limits = limits
        self._clock = clock
        self._running = RunningRequests(kv)
        self._queue = WaitingQueue(policy, lambda: kv.cache, kv.page_size)
        self._planner = Planner(
            kv,
            self._running,
            self._queue,
            limits.prefill_tokens_per_step,
            policy.preemption,
            mix_chunks=limits.mix_chunks,
        )
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[StepPlan, tuple[Request, ...]]] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._compiling: dict[str, Request] = {}  # those whose grammar is on its way
        self._prefetching: dict[str, Request] = {}  # waiting ones for which something is brought to host memory
        self._awaiting_prefetch: list[Request] = []  # those of them that waited for it when a step was last planned
        self._updates: list[RequestUpdate] = []
        self._num_steps = self._num_added = self._num_finished = 0
        self._prompt_tokens = self._generated_tokens = self._jump_forward_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, a step uncommitted, or an update not taken."""
        return bool(self._requests or self._in_flight or self._updates)

    @property
    def next_deadline_s(self) -> float | None:
        """The clock reading at which `plan` has something to do even if nothing else happens; None for never."""
        deadlines = [r.grammar.deadline_s for r in self._compiling.values() if r.grammar is not None]
        tickets = [request.prefetch for request in self._awaiting_prefetch]
        deadlines += [t.deadline_s for t in tickets if t is not None and t.deadline_s is not None]
        if self._deadlines:
            deadlines.append(self._deadlines[0][0])
        return min(deadlines, default=None)

    @property
    def used_adapter_slots(self) -> Counter[int]:
        """Unfinished requests by the slot of their adapter, those without one left out."""
        return Counter(request.adapter.slot for request in self._requests.values() if request.adapter is not None)

    @property
    def counters(self) -> SchedulerCounters:
        """Sums since the start."""
        return SchedulerCounters(
            steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._planner.cached_tokens,
            generated_tokens=self._generated_tokens,
            finished_requests=self._num_finished,
            retractions=self._planner.num_retractions,
            aged_requests=self._queue.num_aged,
            retracted_tokens=self._planner.num_retracted_tokens,
            cached_host_tokens=self._planner.cached_host_tokens,
            cached_storage_tokens=self._planner.cached_storage_tokens,
            jump_forward_tokens=self._jump_forward_tokens,
        )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: max_queued_requests are waiting.
            NeverFitsError: it needs more pages than there are.
            AdapterNotFoundError: its adapter has been unloaded since it was made.
        """
        if request.adapter is not None and request.adapter.is_unloaded:
            raise AdapterNotFoundError(f"the adapter {request.adapter.name!r} has been unloaded")
        if len(self._queue) >= self._limits.max_queued_requests:
            raise QueueFullError(
                f"{len(self._queue)} requests are waiting, as many as scheduling.max_queued_requests allows. Try later."
            )
        needed, total = self.kv.pages_for(request.max_len), self.kv.pool.num_pages
        if needed > total:
            raise NeverFitsError(
                f"request {request.request_id}: {request.prompt_len} prompt tokens and up to {request.max_new_tokens} "
                f"more need {needed} KV pages, the engine has {total}. Lower max_tokens or raise memory.kv_tokens."
            )
        if self.kv.tiers is not None:
            request.prefetch = self.kv.tiers.cache.prefetch(request.reusable_key())
            if request.prefetch is not None:
                self._prefetching[request.request_id] = request
        self._requests[request.request_id] = request
        self._queue.add(request)
        if request.grammar is not None:
            self._compiling[request.request_id] = request
        self._num_added += 1
        self._prompt_tokens += request.prompt_len
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, self._num_added, request))

    def abort(self, request_id: str, reason: str) -> bool:
        """End a request now, wherever it stands; its pages are free or cached at once. False when it is unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, Finish(FinishReason.ABORT, error=reason))
        return True

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when nothing can run before something is committed or added."""
        now = self._clock()
        self._expire(now)
        self._start_grammars(now)
        if self.kv.tiers is not None:
            self.kv.tiers.begin_plan()
            self._awaiting_prefetch = [r for r in self._prefetching.values() if r.awaits_prefetch(now)]
        plan = self._planner.plan(self._num_steps, now)
        self._release_prefetches()
        if plan is None:
            if self._running.requests and not self._in_flight:
                self._planner.break_standstill()
            return None
        requests = self._running.at(plan.rows)
        for request in requests:
            request.num_in_flight += 1
        self._in_flight.append((plan, requests))
        self._num_steps += 1
        return plan

    def fill_mask(self) -> None:
        """Tell the first step in flight what its requests under a grammar may sample, if it does not know.

        Call it after each commit: what they may sample depends on all tokens before.
        """
        if not self._in_flight:
            return
        plan, requests = self._in_flight[0]
        mask = plan.token_mask
        if mask is None or mask.bits.done():
            return
        sampling = [requests[b] for b in plan.sample_idx[mask.idx].tolist()]
        grammars = [None if _is_stale(request, plan) else request.grammar for request in sampling]
        num_words = next(request.grammar.num_words for request in sampling if request.grammar is not None)
        bits, errors = fill_masks(grammars, num_words)
        mask.bits.set_result(bits)
        for i, error in errors.items():
            self._finish(sampling[i], _failed(str(error), Failure.REQUEST))

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in a step's tokens.

        Effects: appends tokens, ends requests that are done, caches and frees their pages. Tokens of requests that
        ended after the step was planned are dropped.

        Returns: every update since the last commit.
        """
        requests = self._land(plan)
        if plan.copies is not None and self.kv.tiers is not None:
            self.kv.tiers.landed(plan.copies)
        if plan.prompt_spans:
            self._report_prompt_logprobs(plan, requests, result.prompt_logprobs)
        if plan.pool_spans:
            self._commit_pooled(plan, requests, result.pooled)
        now = self._clock()
        token_ids, errors, table = result.token_ids.tolist(), result.errors, result.logprobs
        sampling = requests
        if len(token_ids) != len(requests):
            sampling = tuple([requests[b] for b in plan.sample_idx.tolist()])
        for i, request in enumerate(sampling):
            if request.status is _FINISHED or plan.step_id < request.valid_from_step:  # `_is_stale`, of every token
                continue
            if i in errors:
                self._distrust(request, errors[i])
                continue
            logprobs: tuple[TokenLogprob, ...] = ()
            if table is not None and request.params.logprobs is not None:
                logprobs = (_read_logprob(table, i, token_ids[i], request.params.logprobs),)
            self._commit_token(request, token_ids[i], logprobs, now)
        return self.take_updates()

    def fail(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """Give up a step that raised on the device: its requests fail, all others start again.

        Effects: the step's prompts were published before they were computed, so every running request lets go of its
        pages, and the cache is emptied. Steps planned after it must have ended; they are forgotten.
        """
        failed = self._land(plan)
        self._in_flight.clear()
        if self.kv.tiers is not None:
            self.kv.tiers.lose_copies()
        for request in self._requests.values():
            request.num_in_flight = 0
            request.num_reads_planned = request.num_reads_reported
        for request in list(self._running.requests):
            self._running.discard(request)
            if request not in failed:
                self._planner.requeue(request)
        for request in failed:
            if request.status is not RequestStatus.FINISHED:
                self._finish(request, _failed(error))
        self.kv.reset()
        return self.take_updates()

    def retract_all(self) -> None:
        """Put every running request back into the queue; no step may be in flight."""
        for request in list(self._running.requests):
            self._planner.retract(request)

    def restart_memory(self, make_cache: Callable[[], PrefixCache]) -> None:
        """Have everything computed anew: running requests go back to the queue, and the KV memory starts empty.

        No step may be in flight. Where there are lower tiers, a fresh cache takes the old one's place, as what is in
        storage is known by the weights; what making one raises comes out of here, as from `kv.restart`.
        """
        self.retract_all()
        if self.kv.tiers is None:
            self.kv.reset()
            return
        self._prefetching.clear()
        self._awaiting_prefetch.clear()
        for request in self._requests.values():
            request.prefetch = None
        self.kv.restart(make_cache)

    def expire(self) -> None:
        """End the requests whose time is up; `plan` does so as well."""
        self._expire(self._clock())

    def recover(self, error: str, make_cache: Callable[[], PrefixCache], *, waiting_too: bool = False) -> None:
        """Go on after our own bookkeeping, or a plugin in it, has failed.

        Effects: no page's owner can be trusted any more, so the running requests and the one being planned fail, the KV
        memory starts empty, with a fresh cache, and waiting requests go on. Steps in flight must have ended.

        Args:
            make_cache: called when the old cache has let go of its memory. What it raises comes out of here, when every
                request has failed; `kv.restart` has to succeed before anything else is planned.
            waiting_too: fail them as well, because the failure does not go away without them.
        """
        self._in_flight.clear()
        culprit = self._planner.current
        suspects = [
            r for r in self._requests.values() if waiting_too or r.status is RequestStatus.RUNNING or r is culprit
        ]
        self._running.clear()
        self._prefetching.clear()
        self._awaiting_prefetch.clear()
        for request in self._requests.values():
            request.prefetch = None
        self._planner.forget_rows()
        try:
            self.kv.restart(make_cache)
        except Exception:
            suspects = list(self._requests.values())
            raise
        finally:
            for request in suspects:
                request.row = None
                self._queue.discard(request)
                request.status = RequestStatus.RUNNING
                self._finish(request, _failed(error))
            for request in self._requests.values():
                request.num_in_flight = 0
                request.num_reads_planned = request.num_reads_reported

    def take_updates(self) -> list[RequestUpdate]:
        """Return what happened since the last call."""
        updates, self._updates = self._updates, []
        return updates

    def _land(self, plan: StepPlan) -> tuple[Request, ...]:
        """Return the requests of the step that was planned first among those in flight."""
        expected, requests = self._in_flight.popleft()
        if expected is not plan:
            raise InvariantError(f"step {plan.step_id} is committed before step {expected.step_id}")
        for request in requests:
            request.num_in_flight -= 1
        return requests

    def _commit_token(self, request: Request, token_id: int, logprobs: tuple[TokenLogprob, ...], now: float) -> None:
        request.append(token_id)
        self._generated_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now
        if not (request.is_watched or token_id in request.stop_token_ids or request.num_tokens >= request.max_len):
            self._updates.append(RequestUpdate.of(request, (token_id,), logprobs))
            return
        try:
            finish = _finish_after(request, token_id)
        except RequestError as error:  # its grammar goes no further
            finish = _failed(str(error), Failure.REQUEST)
        if finish is not None:
            self._finish(request, finish, (token_id,), logprobs)
            return
        self._updates.append(RequestUpdate.of(request, (token_id,), logprobs))
        if request.grammar is not None:
            self._jump(request, now)

    def _jump(self, request: Request, now: float) -> None:
        """Append what the request's grammar decides by itself."""
        try:
            jump = None if self._jump_forward is None else self._jump_forward.find(request)
        except RequestError as error:
            self._finish(request, _failed(str(error), Failure.REQUEST))
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the tokenizer's, whose panics are no Exception: it costs this request only
            logger.exception("jump-forward failed; its request ends")
            self._finish(request, _failed(f"jump-forward failed: {type(error).__name__}: {error}"))
            return
        if jump is None:
            return
        num_dropped, num_gained = len(jump.dropped), len(jump.token_ids) - len(jump.dropped)
        request.replace_latest(num_dropped, jump.token_ids)
        request.jump_forward_tokens += num_gained
        self._jump_forward_tokens += num_gained
        self._generated_tokens += num_gained
        request.valid_from_step = self._num_steps
        if request.first_token_s is None:
            request.first_token_s = now
        if request.stop_watch is not None:
            request.stop_watch.jump(num_dropped, jump.token_ids, jump.text)
        if request.row is not None:
            self._planner.rewrite(request, request.num_tokens - len(jump.token_ids))
        elif num_dropped:  # it waits, under tokens that it has no more
            self._queue.remove(request)
            self._queue.add(request)
        changes = RequestUpdate.of(request, jump.token_ids, num_dropped=num_dropped, forced_text=jump.text)
        self._updates.append(changes)

    def _distrust(self, request: Request, error: str) -> None:
        """End a request whose numbers are bad, and empty the cache, because its prompt was published.

        With overlap, a later plan may have retracted it before this step's result arrived; it holds no row then.
        """
        if request.row is not None:
            self._running.discard(request)
        self.kv.reset()
        self._finish(request, _failed(error))

    def _finish(
        self,
        request: Request,
        finish: Finish,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        embedding: bytes | None = None,
    ) -> None:
        """End a request: out of its row or the queue, its last update out."""
        if request.row is not None:
            self._running.release(request)
        elif request.status is RequestStatus.WAITING:
            self._queue.remove(request)
        request.status, request.finished_s = RequestStatus.FINISHED, self._clock()
        del self._requests[request.request_id]
        self._release_prefetches()
        if self._compiling.pop(request.request_id, None) is not None and request.grammar is not None:
            request.grammar.leave()
        self._num_finished += 1
        self._updates.append(RequestUpdate.of(request, token_ids, logprobs, finish=finish, embedding=embedding))

    def _report_prompt_logprobs(
        self, plan: StepPlan, requests: tuple[Request, ...], tables: tuple[LogprobTable, ...]
    ) -> None:
        by_row = dict(zip(plan.rows.tolist(), requests, strict=True))
        for span, table in zip(plan.prompt_spans, tables, strict=True):
            request = by_row[span.row]
            if request.status is RequestStatus.FINISHED:
                continue
            targets = span.targets.tolist()
            logprobs = tuple([_read_logprob(table, i, targets[i], span.num_top) for i in range(len(targets))])
            request.num_reads_reported += len(logprobs)
            self._updates.append(RequestUpdate.of(request, prompt_logprobs=logprobs))

    def _commit_pooled(
        self, plan: StepPlan, requests: tuple[Request, ...], pooled: tuple[NDArray[np.float32], ...]
    ) -> None:
        by_row = dict(zip(plan.rows.tolist(), requests, strict=True))
        for span, hidden in zip(plan.pool_spans, pooled, strict=True):
            request = by_row[span.row]
            if request.status is RequestStatus.FINISHED:
                continue
            if not np.isfinite(hidden).all():
                self._distrust(request, "hidden states are not finite")
                continue
            request.add_pooled(hidden, span.num_tokens)
            if span.is_last:
                self._finish(request, Finish(FinishReason.STOP), embedding=request.pooled.tobytes())

    def _expire(self, now: float) -> None:
        """End the requests whose time is up."""
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # forget those that ended long before their time
            self._deadlines = [d for d in self._deadlines if d[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.status is not RequestStatus.FINISHED:
                seconds = now - request.arrival_s
                reason = f"timed out after {seconds:.3f} s"
                self._finish(request, Finish(FinishReason.ABORT, error=reason, failure=Failure.TIMEOUT))

    def _start_grammars(self, now: float) -> None:
        """Take up the grammars that have been compiled; end the requests whose grammar failed or is late."""
        for request_id, request in list(self._compiling.items()):
            try:
                if request.grammar is not None and request.grammar.start(now):
                    del self._compiling[request_id]
                    self._jump(request, now)
            except RequestError as error:
                failure = Failure.GRAMMAR if isinstance(error, GrammarError) else Failure.REQUEST
                self._finish(request, _failed(str(error), failure))

    def _release_prefetches(self) -> None:
        """Let go of what was brought to host memory for requests that wait no more."""
        for request_id, request in list(self._prefetching.items()):
            if request.status is RequestStatus.WAITING:
                continue
            del self._prefetching[request_id]
            if request.prefetch is not None and self.kv.tiers is not None:
                self.kv.tiers.cache.release(request.prefetch)
            request.prefetch = None


def _is_stale(request: Request, plan: StepPlan) -> bool:
    """Whether what a step samples for a request is not used: it has ended, or gone on another way, meanwhile."""
    return request.status is _FINISHED or plan.step_id < request.valid_from_step


def _failed(error: str, failure: Failure = Failure.ENGINE) -> Finish:
    return Finish(FinishReason.ERROR, error=error, failure=failure)


def _finish_after(request: Request, token_id: int) -> Finish | None:
    """Decide whether a request's latest token ends it.

    Raises:
        RequestError: its grammar allows no further token, or failed.
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


def _read_logprob(table: LogprobTable, i: int, token_id: int, num_top: int) -> TokenLogprob:
    top = zip(table.top_ids[i, :num_top].tolist(), table.top_logprobs[i, :num_top].tolist(), strict=True)
    return TokenLogprob(token_id, float(table.token_logprobs[i]), tuple(top))
