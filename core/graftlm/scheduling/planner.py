"""Which requests take part in the next step, with how many tokens."""

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvariantError
from graftlm.memory import KVManager, Reuse
from graftlm.plan import RowSetup, StepPlan
from graftlm.scheduling.admission import AdmissionControl
from graftlm.scheduling.plan_builder import Chunk, build_plan
from graftlm.scheduling.queue import WaitingQueue
from graftlm.scheduling.request import Request, RequestStatus
from graftlm.scheduling.running import RunningRequests

__all__ = ["Planner"]


class Planner:
    """Plans steps. There are no phases.

    A running request has `known` tokens, of which `computed` are in the KV cache; each step lets computed catch up with
    known, by the one token sampled last, or by a chunk while a prompt is read. A request that catches up samples, and
    knows one token more. Counting that token as known when its step is planned, not when its value arrives, is what
    lets step n + 1 be planned before step n is committed. A request for an embedding is at its limit when it has caught
    up: it does not sample, and ends with that step's commit.

    A row under a grammar samples only tokens that its grammar allows after all tokens before, so it sits out the steps
    between the one in which it samples and that one's commit.

    First come the rows that decode, then running prompts, then waiting requests, while the token budget, the rows and
    the pages last. When a decoding row gets no page, the least important running request is retracted.

    Attributes:
        current: the request being dealt with, to name when something raises; None between requests.
    """

    def __init__(self, kv: KVManager, running: RunningRequests, queue: WaitingQueue, prefill_tokens: int) -> None:
        self.num_retractions = 0
        self.num_retracted_tokens = 0
        self.cached_tokens = 0
        self.cached_host_tokens = 0
        self.cached_storage_tokens = 0
        self.current: Request | None = None
        self._kv = kv
        self._running = running
        self._queue = queue
        self._prefill_tokens = prefill_tokens
        self._admission = AdmissionControl(kv.table, kv.page_size)

    def plan(self, step_id: int, now: float) -> StepPlan | None:
        """Decide the next step; None when no request can go on.

        Effects: reserves pages, counts the step's tokens as computed and its samples as known, publishes what it writes
        of prompts to the cache, admits and retracts requests.
        """
        self.current = None
        retracted = self.num_retractions
        decode_rows = self._reserve_decodes()
        chunks: list[Chunk] = []
        setups: list[RowSetup] = []
        budget = self._continue_prompts(chunks, self._prefill_tokens)
        if self.num_retractions == retracted:  # else what was retracted would come straight back
            self._admit(chunks, setups, budget, now)
        self.current = None
        if not len(decode_rows) and not chunks:
            return None
        table = self._kv.table
        plan = build_plan(
            step_id,
            table,
            self._kv.page_size,
            decode_rows,
            chunks,
            tuple(setups),
            self._running.allowed_bits,
            self._kv.take_copies,
        )
        sampling = plan.rows[plan.sample_idx]
        table.known[sampling] += 1
        table.on_device[sampling] = True
        table.awaits_commit[sampling] = table.constrained[sampling]
        self._admission.step_planned()
        return plan

    def break_standstill(self) -> None:
        """Let the least important running request go: none can run, because each waits for another's pages."""
        if len(self._running) == 1:
            request = self._running.requests[0]
            raise InvariantError(f"request {request.request_id} runs alone and gets no pages: {self._kv.usage}")
        self._retract()

    def requeue(self, request: Request) -> None:
        """Put a request that has left its row back into the queue."""
        request.status = RequestStatus.WAITING
        request.num_retractions += 1
        self._queue.add(request)

    def retract(self, request: Request) -> None:
        """Send a running request back to the queue; its pages become evictable."""
        self.num_retracted_tokens += int(self._kv.table.computed[request.held_row])
        self._running.release(request)
        self.requeue(request)
        self.num_retractions += 1

    def _reserve_decodes(self) -> NDArray[np.int32]:
        """Return the rows whose one token to compute is their latest sample, with room for it."""
        table = self._kv.table
        while True:
            rows = self._running.rows
            can_decode = table.on_device[rows] & ~table.awaits_commit[rows] & (table.known[rows] < table.limit[rows])
            decodes = rows[can_decode]
            if self._kv.reserve(decodes, table.computed[decodes] + 1):
                return decodes
            self._retract()

    def _continue_prompts(self, chunks: list[Chunk], budget: int) -> int:
        """Go on with prompts that are partly computed; returns the budget left."""
        table, rows = self._kv.table, self._running.rows
        partial = np.flatnonzero(~table.on_device[rows] & (table.computed[rows] < table.known[rows]))
        for request in [self._running.requests[i] for i in partial.tolist()]:
            if budget <= 0:
                break
            self.current = request
            if request.reuses_prefix:
                self._count_cached(request, Reuse(self._kv.advance(request.held_row, request.reusable_key())))
            budget -= self._take_chunk(request, chunks, budget)
        return budget

    def _admit(self, chunks: list[Chunk], setups: list[RowSetup], budget: int, now: float) -> None:
        """Let waiting requests in while budget, rows and pages last. Nobody overtakes one that lacks pages."""
        table = self._kv.table
        if budget <= 0 or not len(self._queue) or not table.num_free_rows:
            return
        for request in self._queue.ordered(now):
            if budget <= 0 or not table.num_free_rows:
                return
            if request.num_in_flight:
                continue  # it was retracted, and its last token is still on the way
            if request.grammar is not None and not request.grammar.is_ready:
                continue
            if request.awaits_prefetch(now):
                continue
            self.current = request
            matched = self._running.enter(request, self._admission.reserved_pages())
            if matched is None:
                return
            self._queue.admit(request, now)
            request.admitted_s = now if request.admitted_s is None else request.admitted_s
            self._count_cached(request, matched)
            setups.append(request.setup(request.held_row))
            budget -= self._take_chunk(request, chunks, budget)

    def _take_chunk(self, request: Request, chunks: list[Chunk], budget: int) -> int:
        """Plan as many of a request's next tokens as budget and pages allow; returns how many."""
        kv, row = self._kv, request.held_row
        start = int(kv.table.computed[row])
        room = (int(kv.table.num_pages[row]) + kv.available_pages) * kv.page_size - start
        num_tokens = min(int(kv.table.known[row]) - start, budget, room)
        if num_tokens <= 0:
            return 0
        end = start + num_tokens
        if not kv.extend(row, end):
            return 0
        reads = request.reads(start, end)
        request.num_reads_planned += len(reads)
        chunks.append(Chunk(request, row, start, end, reads))
        kv.table.computed[row] = end
        # Published before it is computed: whoever matches it runs in this step or a later one, and a step writes all
        # keys and values of a layer before anything attends.
        kv.publish(row, request.key(end))
        return num_tokens

    def _retract(self) -> None:
        """Send the least important running request back to the queue."""
        self.retract(self._running.requests[-1])
        self._admission.retracted()

    def _count_cached(self, request: Request, reuse: Reuse) -> None:
        if request.num_retractions:
            return
        for sums in (request, self):
            sums.cached_tokens += reuse.num_tokens
            sums.cached_host_tokens += reuse.host_tokens
            sums.cached_storage_tokens += reuse.storage_tokens
