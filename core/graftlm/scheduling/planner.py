"""Decides which requests take part in the next step, and with how many tokens."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import Preemption
from graftlm.errors import InvariantError
from graftlm.memory import KVManager, Reuse
from graftlm.plan import RowSetup, StepPlan
from graftlm.scheduling.admission import AdmissionControl
from graftlm.scheduling.media_feeding import MediaFeeding
from graftlm.scheduling.plan_builder import FEW_ROWS, Chunk, DecodeRows, build_plan, media_plan
from graftlm.scheduling.queue import WaitingQueue
from graftlm.scheduling.request import Request, RequestStatus
from graftlm.scheduling.running import RunningRequests
from graftlm.types import TokenIds

__all__ = ["DraftRows", "Planner"]

#: Function from the decode requests of a step to a mapping row -> draft, int32 [n].
DraftRows = Callable[[Sequence[Request]], Mapping[int, TokenIds]]


class Planner:
    """Plans steps. Prefill and decode are not separate phases.

    A running request has `known` tokens, of which `computed` are in the KV cache. Each step increases `computed`: by
    one token in decode, by a chunk in prefill. When `computed` reaches `known`, the request samples, and `known` grows
    by one. The sampled token counts as known when its step is planned, before its value arrives; therefore step n + 1
    can be planned before step n is committed. A request for an embedding does not sample, and ends with the commit of
    the step that computes its last token.

    A row with a grammar is planned like any other row. Its token mask is set when all earlier tokens are committed. The
    step's sampling waits for the mask; its forward pass does not.

    A step takes decode rows first, then prompts that are partly computed, then waiting requests, as long as token
    budget, rows and pages suffice. If a decode row gets no page, the least important running request is retracted. If
    the policy preempts, waiting requests of sufficient priority are admitted first, and the least important running
    requests are retracted for them. Without `mix_chunks`, decode rows keep their pages but skip steps that contain
    prefill.

    Attributes:
        current: the request that is being planned; it fails if planning raises. None if no single request is being
            planned.
    """

    def __init__(
        self,
        kv: KVManager,
        running: RunningRequests,
        queue: WaitingQueue,
        prefill_tokens: int,
        preemption: Preemption | None = None,
        *,
        mix_chunks: bool = True,
        media: MediaFeeding | None = None,
    ) -> None:
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
        self._preemption = preemption
        self._mix_chunks = mix_chunks
        self._media = media
        self._setups: dict[int, RowSetup] = {}  # row -> setup of requests that were admitted since the last plan
        self._decoding = DecodeRows.of(np.empty(0, dtype=np.int32), kv.table)  # the decode rows of the last plan
        self._admission = AdmissionControl(kv.table, kv.page_size)

    def plan(self, step_id: int, now: float, draft: DraftRows | None = None) -> StepPlan | None:
        """Return the plan of the next step; None if no request can continue.

        Args:
            draft: function that returns drafts for the rows of a step without prefill; None if the values of some
                tokens are not known on the host yet.

        Effects: admits and retracts requests, reserves pages, increases `computed` and `known`, and publishes the
            step's prompt tokens to the cache.
        """
        self.current = None
        if self._preemption is not None:
            self._preempt(self._preemption.min_difference, now)
            self.current = None
        retracted = self.num_retractions
        decode_rows = self._reserve_decodes()
        chunks: list[Chunk] = []
        budget = self._prefill_tokens
        if len(decode_rows) < len(self._running):
            budget = self._continue_prompts(chunks, budget)
        if self.num_retractions == retracted:  # else the retracted request would be admitted again
            self._admit(chunks, budget, now)
        self.current = None
        if chunks and not self._mix_chunks:
            decode_rows = decode_rows[:0]
        has_running = bool(chunks) or len(decode_rows) > 0
        media_work = None if self._media is None else self._media.take_work(has_running=has_running)
        if not has_running:
            return None if media_work is None else media_plan(step_id, media_work)
        if draft is not None and not chunks and len(decode_rows):
            decode_rows = self._add_drafts(draft, decode_rows, chunks)
        if decode_rows is not self._decoding.rows:
            self._decoding = DecodeRows.of(decode_rows, self._kv.table)
        setups = tuple(self._setups.values())
        self._setups.clear()
        plan = build_plan(
            step_id,
            self._kv.table,
            self._kv.page_size,
            self._decoding,
            chunks,
            setups,
            self._kv.row_windows,
            self._kv.take_copies,
            self._kv.states,
            media_work,
        )
        self._kv.settle_step()
        self._admission.step_planned()
        return plan

    def _add_drafts(self, draft: DraftRows, decode_rows: NDArray[np.int32], chunks: list[Chunk]) -> NDArray[np.int32]:
        """Plan the rows that have drafts as chunks; return the other rows.

        A draft is shortened if there are too few free and evictable pages that no running request needs.
        """
        kv = self._kv
        requests = self._running.at(decode_rows)
        drafts = draft(requests)
        drafted: list[int] = []
        num_spare = kv.available_pages - self._admission.reserved_pages(leaving=list(drafts)) if drafts else 0
        for request in requests:
            row = request.held_row
            token_ids = drafts.get(row)
            if token_ids is None:
                continue
            num_held = int(kv.table.num_pages[row])
            room = (num_held + max(num_spare, 0)) * kv.page_size - request.num_tokens
            token_ids = token_ids[: max(room, 0)]
            start, end = request.num_tokens - 1, request.num_tokens + len(token_ids)
            if not len(token_ids) or not kv.extend(row, end):
                continue
            num_spare -= int(kv.table.num_pages[row]) - num_held
            chunks.append(Chunk(request, row, start, end, drafts=token_ids))
            kv.table.computed[row] = request.num_tokens
            drafted.append(row)
        return decode_rows[~np.isin(decode_rows, drafted)] if drafted else decode_rows

    def reserve_ahead(self, requests: Sequence[Request], num_tokens: int) -> None:
        """Allocate slots for tokens after the requests' latest tokens, from pages that no running request needs.

        Args:
            num_tokens: number of tokens; a request gets fewer slots if its length limit or the pages do not allow more.
        """
        kv = self._kv
        num_spare = (
            kv.available_pages - self._admission.reserved_pages([r.held_row for r in requests]) if num_tokens else 0
        )
        for request in requests:
            if num_spare <= 0:
                return
            row = request.held_row
            num_held = int(kv.table.num_pages[row])
            room = (num_held + num_spare) * kv.page_size
            kv.extend(row, min(request.num_tokens + num_tokens, request.max_len, room))
            num_spare -= int(kv.table.num_pages[row]) - num_held

    def break_standstill(self) -> None:
        """Retract the least important running request, because every running request waits for pages."""
        if len(self._running) == 1:
            request = self._running.requests[0]
            raise InvariantError(f"request {request.request_id} runs alone and gets no pages: {self._kv.usage}")
        self._retract()

    def forget_rows(self) -> None:
        """Delete the setups of rows that were allocated since the last plan, because the KV memory restarts empty."""
        self._setups.clear()

    def requeue(self, request: Request) -> None:
        """Put a request that has left its row back into the queue."""
        request.status = RequestStatus.WAITING
        request.num_retractions += 1
        self._queue.add(request)

    def retract(self, request: Request) -> None:
        """Put a running request back into the queue; its pages become evictable."""
        self._setups.pop(request.held_row, None)
        self.num_retracted_tokens += int(self._kv.table.computed[request.held_row])
        self._running.release(request)
        self.requeue(request)
        self.num_retractions += 1

    def rewrite(self, request: Request, num_kept: int) -> None:
        """Continue a running request after its tokens from index `num_kept` on were replaced by tokens to compute.

        Effects: retracts the request if replaced tokens were published, if window pages that it needs may have been
            freed, or if its recurrent state contains replaced tokens.
        """
        kv, row = self._kv, request.held_row
        table = kv.table
        is_shared = num_kept < int(table.cached_pages[row]) * kv.page_size
        goes_back = num_kept < int(table.computed[row])
        has_passed = goes_back and (kv.row_windows is not None or kv.states is not None)
        table.computed[row] = min(int(table.computed[row]), num_kept)
        if is_shared or has_passed:
            self.retract(request)
            return
        table.known[row] = request.num_tokens
        table.on_device[row] = False
        self._setups[row] = request.setup(row)

    def _reserve_decodes(self) -> NDArray[np.int32]:
        """Reserve a slot for the next token of each decode row; return the decode rows."""
        table = self._kv.table
        while len(self._running) > FEW_ROWS:
            rows = self._running.rows
            can_decode = table.on_device[rows] & (table.known[rows] < table.limit[rows])
            decodes = rows if can_decode.all() else rows[can_decode]
            if self._kv.reserve(decodes, table.computed[decodes] + 1):
                return decodes
            self._retract()
        return self._reserve_few()

    def _reserve_few(self) -> NDArray[np.int32]:
        """Do the same as `_reserve_decodes` in a Python loop, which is faster for few rows."""
        kv, table = self._kv, self._kv.table
        while True:
            rows = self._running.rows
            few = rows.tolist()
            decodes = [row for row in few if table.on_device[row] and table.known[row] < table.limit[row]]
            if all(kv.extend(row, int(table.computed[row]) + 1) for row in decodes):
                return rows if len(decodes) == len(few) else np.array(decodes, dtype=np.int32)
            self._retract()

    def _continue_prompts(self, chunks: list[Chunk], budget: int) -> int:
        """Plan chunks of prompts that are partly computed; return the remaining budget in tokens."""
        table, rows = self._kv.table, self._running.rows
        (partial,) = (~table.on_device[rows] & (table.computed[rows] < table.known[rows])).nonzero()
        for request in [self._running.requests[i] for i in partial.tolist()]:
            if budget <= 0:
                break
            self.current = request
            num_computed = int(table.computed[request.held_row])
            if num_computed < request.reusable_len:
                in_prompt = num_computed < request.prompt_len
                reuse = Reuse(self._kv.advance(request.held_row, request.reusable_key()))
                if in_prompt:
                    self._count_cached(request, reuse)
            budget -= self._take_chunk(request, chunks, budget)
        return budget

    def _preempt(self, min_difference: int, now: float) -> None:
        """Admit waiting requests whose priority is high enough to retract running requests."""
        highest, running, budget = self._queue.highest_priority, self._running.requests, self._prefill_tokens
        if highest is None or not running or highest - running[-1].priority < min_difference:
            return
        for request in self._queue.ordered(now):
            if budget <= 0 or not running or request.priority - running[-1].priority < min_difference:
                return
            if request.can_be_admitted(now):
                if not self._enter_for(request, request.priority - min_difference, now):
                    return
                budget -= request.num_tokens - int(self._kv.table.computed[request.held_row])

    def _enter_for(self, request: Request, highest_victim: int, now: float) -> bool:
        """Admit a request, and retract requests of priority `highest_victim` or less until it has enough pages."""
        if self._enter(request, now):
            return True
        running, kv = self._running.requests, self._kv
        rows = [victim.held_row for victim in running if victim.priority <= highest_victim]
        lacking = kv.pages_for(request.num_tokens) - kv.cache.probe(request.reusable_key())
        freed = int(kv.table.num_pages[rows].sum())  # an upper limit: pages shared with other rows are not freed
        if lacking + self._admission.reserved_pages(leaving=rows) > kv.available_pages + freed:
            return False
        while running and running[-1].priority <= highest_victim:
            self.retract(running[-1])
            if self._enter(request, now):
                return True
        return False

    def _admit(self, chunks: list[Chunk], budget: int, now: float) -> None:
        """Admit waiting requests while budget, rows and pages suffice. The first request that lacks pages ends this."""
        if budget <= 0 or not len(self._queue) or not self._has_room():
            return
        for request in self._queue.ordered(now):
            if budget <= 0:
                return
            if request.can_be_admitted(now):
                if not self._enter(request, now):
                    return
                budget -= self._take_chunk(request, chunks, budget)

    def _has_room(self) -> bool:
        """Return whether a row and at least one page are free; even a request with a cached prompt needs a page."""
        kv = self._kv
        return bool(kv.table.num_free_rows) and self._admission.reserved_pages() < kv.available_pages

    def _enter(self, request: Request, now: float) -> bool:
        """Move a request from the queue to a row if a row and enough pages are free."""
        self.current = request
        if not self._kv.table.num_free_rows:
            return False
        matched = self._running.enter(request, self._admission.reserved_pages())
        if matched is None:
            return False
        self._queue.admit(request, now)
        request.admitted_s = now if request.admitted_s is None else request.admitted_s
        self._count_cached(request, matched)
        self._setups[request.held_row] = request.setup(request.held_row)
        return True

    def _take_chunk(self, request: Request, chunks: list[Chunk], budget: int) -> int:
        """Plan the next tokens of a request, limited by budget and pages; return their number."""
        kv, row = self._kv, request.held_row
        start = int(kv.table.computed[row])
        available = min(kv.available_pages, kv.available_window_pages)
        room = (int(kv.table.num_pages[row]) + available) * kv.page_size - start
        most = start + min(int(kv.table.known[row]) - start, room)
        end = min(most, start + budget)
        if request.media is not None and self._media is not None and end > start:
            end = self._media.reach(request, start, end, most)
        num_tokens = end - start
        if num_tokens <= 0:
            return 0
        if not kv.extend(row, end):
            return 0
        if request.media is not None and self._media is not None:
            self._media.planned(request, end)
        reads = request.reads(start, end)
        request.num_reads_planned += len(reads)
        chunks.append(Chunk(request, row, start, end, reads))
        kv.plan_states(row, start, end)
        kv.table.computed[row] = end
        # The chunk is published before it is computed. A request that reuses it runs in this step or a later one, and
        # in each layer a step writes all keys and values before attention reads them. Output under a grammar is
        # published when the request ends, because its tokens may be replaced until then.
        kv.publish(row, request.key(end if request.grammar is None else min(end, request.prompt_len)))
        return num_tokens

    def _retract(self) -> None:
        """Retract the least important running request."""
        self.retract(self._running.requests[-1])
        self._admission.retracted()

    def _count_cached(self, request: Request, reuse: Reuse) -> None:
        if request.num_retractions:
            return
        num_tokens = min(reuse.num_tokens, request.prompt_len - request.cached_tokens)  # only prompt tokens are counted
        for sums in (request, self):
            sums.cached_tokens += num_tokens
            sums.cached_host_tokens += reuse.host_tokens
            sums.cached_storage_tokens += reuse.storage_tokens
