"""The loop that plans, runs and commits steps."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from graftlm.contracts import Outcome, PrefixCache, PrefixKey, StepCopies, StepExecutor
from graftlm.errors import RankFailedError
from graftlm.grammar.grammar_choice import Grammars
from graftlm.memory.cache_snapshot import cache_snapshot
from graftlm.observers import Observers, notify
from graftlm.plan import StepPlan, StepResult
from graftlm.records import EngineStats, RequestRecord, StepRecord
from graftlm.scheduling import Request, RequestUpdate, Scheduler
from graftlm.types import Timings

__all__ = ["StepLoop"]

logger = logging.getLogger(__name__)


class Mover(Protocol):
    """Copies KV blocks between the device and host memory; see `graftlm.execution.block_mover.BlockMover`."""

    def copy(self, copies: StepCopies) -> None:
        """Make copies and wait until they are done."""
        ...

    def free(self) -> None:
        """Drop all references to host memory."""
        ...

    def close(self) -> None:
        """Release buffers and streams."""
        ...


class StepLoop:
    """Drives the scheduler and the executor.

    Without overlap, a call of `step` plans a step, runs it and commits it. With overlap, a call plans and launches step
    n + 1, and then commits step n. If the scheduler needs the result of step n first, the call commits step n before it
    plans step n + 1.

        host      plan 1 | plan 2 | commit 1, plan 3 | commit 2, plan 4 | ...
        device           |   step 1   |   step 2     |   step 3         | ...

    Attributes:
        host_s: seconds spent on planning and committing so far.
        model_s: seconds spent by the executor so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        overlap: bool,
        make_cache: Callable[[], PrefixCache],
        observers: Observers,
        clock: Callable[[], float],
        mover: Mover | None = None,
        grammars: Grammars | None = None,
        close_media: Callable[[], None] | None = None,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.host_s = 0.0
        self.model_s = 0.0
        self._executor = executor
        self._depth = 1 if overlap else 0
        self._make_cache = make_cache
        self._observers = observers
        self._mover = mover
        self._grammars = grammars
        self._close_media = close_media
        self._clock = clock
        self._debug = debug
        self._has_failed = False  # whether a failure occurred since the last step was launched
        self._pending: deque[tuple[StepPlan, Outcome[StepResult], float]] = deque()
        self._is_stuck = False

    @property
    def idle_s(self) -> float | None:
        """Seconds until `step` has work if no request is added; None if it has no work before a request is added.

        A request whose grammar is being compiled does not count as work until the request's deadline.
        """
        if not self.scheduler.has_work:
            return None
        if not self._is_stuck:
            return 0.0
        deadline_s = self.scheduler.next_deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._clock())

    def step(self) -> list[RequestUpdate]:
        """Plan and run one step of every running request.

        Returns: the updates of the committed step; empty if no step was committed. Errors of a step or a plugin are not
            raised; each affected request ends with an update that has the error.
        """
        try:
            updates = self._step()
            if self._debug:
                self.scheduler.kv.check()
        except Exception as error:
            self._recover(error)
            updates = self.scheduler.take_updates()
            self._is_stuck = False
        return self._reported(updates)

    def add(self, requests: Sequence[Request], when_compiled: Callable[[], None]) -> None:
        """Queue requests; if one is refused, queue none of them.

        Args:
            when_compiled: function that is called from any thread when a request's grammar has been compiled or its
                prefetch has ended; `step` then has work.

        Raises:
            RequestError: a request is refused. The requests before it are aborted, and their updates may still be
                returned.
        """
        added: list[Request] = []
        try:
            for request in requests:
                self.scheduler.add(request)
                added.append(request)
        except Exception:
            for request in added:
                self.abort(request.request_id, "another request of the same call was refused")
            raise
        for request in added:
            if request.grammar is not None:
                request.grammar.when_compiled(when_compiled)
            if request.prefetch is not None:
                request.prefetch.when_done(when_compiled)

    def settle(self) -> list[RequestUpdate]:
        """Commit the steps in flight without planning further ones; return the updates."""
        updates: list[RequestUpdate] = []
        try:
            while self._pending:
                self.scheduler.fill_mask()
                updates += self._commit(*self._pending.popleft())
        except Exception as error:
            self._recover(error)
        return self._reported(updates) + self.take_updates()

    def retract_all(self) -> None:
        """Put every running request back into the queue; its keys and values stay cached. Call `settle` first."""
        try:
            self.scheduler.retract_all()
        except Exception as error:
            self._recover(error)

    def expire(self) -> list[RequestUpdate]:
        """End the requests whose deadline has passed; return the updates. Called while the loop is paused."""
        try:
            self.scheduler.expire()
        except Exception as error:
            self._recover(error)
        return self.take_updates()

    def run_on_device(self, function: Callable[[], None]) -> None:
        """Run a function on the thread that runs the steps, after the steps in flight, and wait for it."""
        self._executor.call(function).result()

    def change_model(self, change: Callable[[], None], *, keep_memory: bool) -> None:
        """Change the model's weights on the thread that runs the steps. Call `settle` first.

        Effects: unless `keep_memory`, the KV memory starts empty on all tiers, and running requests are put back into
            the queue. The caller delivers the updates that `settle` returned.

        Raises:
            Exception: any error of `change`; the KV memory is emptied in this case too.
        """
        try:
            self.run_on_device(change)
        finally:
            if not keep_memory:
                self._restart_memory()

    def release_memory(self, release: Callable[[], None]) -> None:
        """Empty the KV memory on all tiers, and release it on the thread that runs the steps. Call `settle` first.

        Effects: running requests are put back into the queue. The caller delivers the updates that `settle` returned,
            and does not call `step` until `resume_memory` has returned.

        Args:
            release: function that releases the memory of keys and values.
        """
        try:
            self.scheduler.release_memory()
        except Exception as error:
            self._recover(error)
        self.run_on_device(release)
        if self._mover is not None:
            self._mover.free()

    def resume_memory(self) -> None:
        """Create the prefix cache again after `release_memory`, if it was closed. The memory must be allocated again.

        Raises:
            Exception: any error of the cache's provider; this method may then be called again.
        """
        if not self.scheduler.kv.has_cache:
            self.scheduler.kv.restart(self._make_cache)

    def _restart_memory(self) -> None:
        try:
            self.scheduler.restart_memory(self._make_cache)
        except Exception as error:
            self._recover(error)

    def check_executor(self) -> None:
        """Check that steps can run.

        Raises:
            RankFailedError: the ranks have ended.
        """
        if (failure := self._executor.failure) is not None:
            raise failure

    def when_executor_fails(self, callback: Callable[[], None]) -> None:
        """Set a function that is called, from any thread, when the ranks have ended; `check_executor` then raises."""
        self._executor.when_failed(callback)

    def take_updates(self) -> list[RequestUpdate]:
        """Return the updates that `step` has not returned yet."""
        return self._reported(self.scheduler.take_updates())

    def abort(self, request_id: str, reason: str) -> None:
        """End a waiting or running request; the next step returns its last update. Unknown ids are ignored."""
        try:
            self.scheduler.abort(request_id, reason)
        except Exception as error:
            self._recover(error)

    def flush_cache(self) -> int:
        """Drop every cached prefix that no running request uses; return the number of tokens dropped."""
        try:
            return self.scheduler.kv.reset() * self.scheduler.kv.page_size
        except Exception as error:
            self._recover(error)
            return 0

    def pin(self, key: PrefixKey, ttl_s: float) -> int:
        """Pin the cached part of a key for `ttl_s` seconds; return its number of tokens. See `PrefixCache.pin`."""
        try:
            return self.scheduler.kv.cache.pin(key, ttl_s) * self.scheduler.kv.page_size
        except Exception as error:
            self._recover(error)
            return 0

    def unpin(self, key: PrefixKey) -> bool:
        """Remove a pin before its time is over; return whether there was one."""
        try:
            return self.scheduler.kv.cache.unpin(key)
        except Exception as error:
            self._recover(error)
            return False

    def cache_snapshot(self) -> dict[str, Any]:
        """Return the prefix cache's content as plain data; see `graftlm.memory.cache_snapshot`."""
        return cache_snapshot(self.scheduler.kv.cache, self.scheduler.kv.page_size, self._clock())

    def stats(self) -> EngineStats:
        """Return the current state, and counters since the start. Call it between two steps."""
        scheduler, usage, counters = self.scheduler, self.scheduler.kv.usage, self.scheduler.counters
        return EngineStats(
            running_requests=scheduler.num_running,
            waiting_requests=scheduler.num_waiting,
            total_pages=usage.total,
            free_pages=usage.free,
            evictable_pages=usage.evictable,
            locked_pages=usage.locked,
            owned_pages=usage.owned,
            evicted_pages=scheduler.kv.evicted_pages,
            evicted_tokens=scheduler.kv.evicted_pages * scheduler.kv.page_size,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            finished_requests=counters.finished_requests,
            retractions=counters.retractions,
            aged_requests=counters.aged_requests,
            retracted_tokens=counters.retracted_tokens,
            eviction_age_s=scheduler.kv.cache.eviction_age_s,
            host_s=self.host_s,
            model_s=self.model_s,
            cached_host_tokens=counters.cached_host_tokens,
            cached_storage_tokens=counters.cached_storage_tokens,
            tiers=None if scheduler.kv.tiers is None else scheduler.kv.tiers.cache.tier_stats,
            jump_forward_tokens=counters.jump_forward_tokens,
            grammar_hits=0 if self._grammars is None else self._grammars.hits,
            grammar_misses=0 if self._grammars is None else self._grammars.misses,
            drafts={name: (counts.drafted, counts.accepted) for name, counts in counters.drafts.items()},
            states=None if scheduler.kv.states is None else scheduler.kv.states.pool.stats,
        )

    def close(self) -> None:
        """Wait for the steps in flight, write pending blocks to storage, and release the executor."""
        self._close_tiers()
        self._drain()
        if self._grammars is not None:
            self._grammars.close()
        self._executor.close()
        if self._close_media is not None:
            self._close_media()
        if self._mover is not None:
            self._mover.close()

    def _close_tiers(self) -> None:
        tiers = self.scheduler.kv.tiers
        if tiers is None:
            return
        self.settle()
        try:
            tiers.cache.flush()
            self._copy_idle()
            tiers.cache.close()
        except Exception:  # the engine closes in any case
            logger.exception("the prefix cache's lower tiers did not close")

    def _step(self) -> list[RequestUpdate]:
        if not self.scheduler.kv.has_cache:
            self.scheduler.kv.restart(self._make_cache)
        updates: list[RequestUpdate] = []
        while self._pending and self.scheduler.must_commit_first():
            updates += self._commit(*self._pending.popleft())
            self.scheduler.fill_mask()
        start = self._clock()
        plan = self.scheduler.plan()
        plan_s = self._clock() - start
        self.host_s += plan_s
        self.scheduler.fill_mask()
        if plan is not None:
            self._has_failed = False
            self._pending.append((plan, self._executor.submit(plan), plan_s))
        self._is_stuck = not self._pending and not self.scheduler.num_running
        if self._pending and (plan is None or len(self._pending) > self._depth):
            updates += self._commit(*self._pending.popleft())
            self.scheduler.fill_mask()
        if not self._pending and not self.scheduler.num_running:
            self._copy_idle()
        return updates + self.scheduler.take_updates()

    def _copy_idle(self) -> None:
        """Run the queued copies between device and host memory now, because no step is planned that could run them."""
        tiers = self.scheduler.kv.tiers
        copies = None if tiers is None else tiers.take_all()
        mover = self._mover
        if tiers is None or copies is None or mover is None:
            return
        try:
            self._executor.call(lambda: mover.copy(copies)).result()
        except Exception:
            logger.exception("copies between device and host memory failed; their tokens are computed again")
            tiers.lose_copies()
        else:
            tiers.copies_done(copies)

    def _commit(self, plan: StepPlan, outcome: Outcome[StepResult], plan_s: float) -> list[RequestUpdate]:
        try:
            result = outcome.result()
        except BaseException as error:  # including SystemExit raised by a plugin
            logger.error(
                "step %d failed on the device: the requests of this step fail, and other requests are queued again",
                plan.step_id,
                exc_info=None if isinstance(error, RankFailedError) else error,  # its traceback says nothing
            )
            self._drain()
            return self.scheduler.fail(plan, _describe(error))
        start = self._clock()
        updates = self.scheduler.commit(plan, result)
        commit_s = self._clock() - start
        self.host_s += commit_s
        self.model_s += result.model_s
        if self._observers.step_finished:
            self._report_step(plan, plan_s + commit_s, result.model_s)
        return updates

    def _recover(self, error: Exception) -> None:
        """Restart with empty KV memory after a failure of the scheduler or of a plugin that it calls.

        Running requests fail. Waiting requests fail too if no step was launched since the previous failure, because one
        of them may be the cause.
        """
        is_repeated, self._has_failed = self._has_failed, True
        if is_repeated:
            logger.error("another failure before a step was launched: every request fails", exc_info=error)
        else:
            logger.error(
                "KV memory is created again, empty: running requests fail, waiting requests continue", exc_info=error
            )
        self._drain()
        try:
            self.scheduler.recover(_describe(error), self._make_cache, waiting_too=is_repeated)
        except Exception:
            if self.scheduler.kv.has_cache:
                logger.exception("the recovery failed")
            else:
                logger.exception("no prefix cache can be created: all requests fail until a cache can be created")

    def _drain(self) -> None:
        """Wait until the launched steps end, and drop their results."""
        for plan, _, _ in self._pending:
            if plan.token_mask is not None:
                plan.token_mask.bits.cancel()  # else the step would wait for its mask forever
        while self._pending:
            self._pending.popleft()[1].exception()

    def _report_step(self, plan: StepPlan, host_s: float, model_s: float) -> None:
        kv = self.scheduler.kv
        record = StepRecord(
            step_id=plan.step_id,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_decodes=plan.num_decodes,
            num_prefill_tokens=plan.num_prefill_tokens,
            host_s=host_s,
            model_s=model_s,
            free_pages=kv.pool.num_free,
            evictable_pages=kv.cache.evictable_pages,
            locked_pages=kv.cache.locked_pages,
        )
        notify(self._observers.step_finished, record)

    def _reported(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        """Report ended requests to the observers; return the updates."""
        for update in updates if self._observers.request_finished else ():
            if update.finish is None or update.usage is None:
                continue
            timings = Timings(update.queue_s, update.first_token_s, update.total_s)
            record = RequestRecord(
                update.request_id, update.finish.reason, update.usage, timings, update.num_retractions
            )
            notify(self._observers.request_finished, record)
        return updates


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
