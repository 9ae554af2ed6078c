"""Drafts from a smaller model: what it would generate greedily after each request's tokens.

The draft model computes a request's tokens itself, and keeps their keys and values in a memory of its own:

    tokens of the request     t0 t1 t2 t3 t4 t5
    computed by earlier calls t0 t1 t2 d3 d4         d3 was a draft and is right, d4 was rejected
    kept                      t0 t1 t2 t3            what differs is overwritten
    computed by this call                 t4 t5 d6 d7 .. and the last draft, d8, is not computed
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graftlm.contracts import Continuations, Draft, Drafter, DraftModel, DraftModelBatch, DraftRequest
from graftlm.types import TokenIds
from graftlm_speculation.options import DraftModelDrafterOptions
from graftlm_speculation.row_pages import RowPages

__all__ = ["DraftModelDrafter"]

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class _Row:
    """What the draft model knows of a request.

    Attributes:
        computed: int32 [n], the tokens whose keys and values are in the row's pages.
        known: int32, the request's tokens before `draft`.
        draft: the latest draft; None without.
    """

    computed: TokenIds
    known: TokenIds
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class _Task:
    """The part of a request that one batch computes.

    Attributes:
        num_computed: tokens whose keys and values are in memory.
        num_tokens: tokens to compute, at least 1.
        limit: tokens to draft; 0 if known tokens remain.
    """

    request: DraftRequest
    num_computed: int
    num_tokens: int
    limit: int

    @property
    def token_ids(self) -> TokenIds:
        return self.request.token_ids[self.num_computed : self.num_computed + self.num_tokens]


class DraftModelDrafter(Drafter):
    """Runs the draft model for all requests of a call in one batch.

    A call computes at most `prefill_tokens` known tokens. Requests with few of them come first, and a long prompt is
    computed over several calls, without a draft until the last one. A draft is kept: if the request's next tokens equal
    it, its remaining tokens are returned without computing.

    If the memory is full, the requests that were drafted for least recently lose their keys and values. A request that
    is too long for the whole memory, or for the draft model's context, has no drafts and no pages.
    """

    def __init__(self, options: DraftModelDrafterOptions, model: DraftModel) -> None:
        self._model = model
        self._max_drafts = options.max_drafts
        self._prefill_tokens = options.prefill_tokens
        self._pages = RowPages(model.num_pages, model.page_size)
        self._max_len = min(model.context_len, model.num_pages * model.page_size)
        self._rows: dict[int, _Row] = {}

    @property
    def is_expensive(self) -> bool:
        """True."""
        return True

    @property
    def num_free_pages(self) -> int:
        """Pages of the memory that no request has."""
        return self._pages.num_free

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Return what the draft model would generate after each request's tokens."""
        drafts = {request.row: self._kept_draft(request) for request in requests}
        asked: list[DraftRequest] = []
        for request in requests:
            if not self._can_compute(request):
                self.close(request.row)  # nor can later calls, and others need the pages
            elif drafts[request.row] is None:
                asked.append(request)
        tasks = self._tasks(self._placed(asked))
        for at in range(0, len(tasks), self._model.max_rows):
            self._run(tasks[at : at + self._model.max_rows], drafts)
        return [drafts[request.row] for request in requests]

    def close(self, row: int) -> None:
        """Free a request's pages."""
        self._pages.release(row)
        self._rows.pop(row, None)

    def _kept_draft(self, request: DraftRequest) -> Draft | None:
        """Return the rest of the latest draft, if the request's new tokens equal its beginning.

        The rest may be one token shorter than a new draft. An engine that plans a step ahead asks for a draft that
        begins with the token in flight, and later for the one after this token.
        """
        row = self._rows.get(request.row)
        if row is None or row.draft is None:
            return None
        num_new = len(request.token_ids) - len(row.known)
        rest = row.draft.token_ids[max(0, num_new) :]
        if num_new < 0 or len(rest) < max(1, min(request.limit, self._max_drafts) - 1):
            return None
        followed = np.concatenate([row.known, row.draft.token_ids[:num_new]])
        if not np.array_equal(request.token_ids, followed):
            return None
        return Draft(rest[: request.limit], row.draft.confidence)

    def _can_compute(self, request: DraftRequest) -> bool:
        token_ids = request.token_ids
        return len(token_ids) < self._max_len and bool((token_ids < self._model.vocab_size).all())

    def _limit(self, request: DraftRequest) -> int:
        """Return the maximum length of the draft; its last token needs no place in the context and the memory."""
        room = self._max_len - len(request.token_ids) + 1
        return min(request.limit, self._max_drafts, room)

    def _placed(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Return the requests whose tokens and drafts have pages now.

        Requests that have pages come first, the most recently used one before all: it may take the pages of those after
        it. A new request takes only free pages, and those of requests that are not asked for.
        """
        by_row = {request.row: request for request in requests}
        held = [by_row[row] for row in self._pages if row in by_row]
        new = [request for request in requests if request.row not in self._pages]
        placed: dict[int, DraftRequest] = {}
        for request in (*held, *new):
            kept = placed if request.row in self._pages else by_row
            num_tokens = len(request.token_ids) + self._limit(request) - 1
            evicted = self._pages.reserve(request.row, num_tokens, kept)
            for row in evicted or ():
                self._rows.pop(row, None)
            if evicted is not None:
                placed[request.row] = request
        return list(placed.values())

    def _tasks(self, requests: Sequence[DraftRequest]) -> list[_Task]:
        """Return what this call computes, within `prefill_tokens` tokens; requests with few known tokens first."""
        missing = []
        for request in requests:
            num_computed = self._truncate(request)
            missing.append((len(request.token_ids) - num_computed, num_computed, request))
        missing.sort(key=lambda entry: entry[0])
        budget, tasks = self._prefill_tokens, []
        for num_missing, num_computed, request in missing:
            num_tokens = min(num_missing, budget)
            if num_tokens:
                limit = self._limit(request) if num_tokens == num_missing else 0
                tasks.append(_Task(request, num_computed, num_tokens, limit))
                budget -= num_tokens
        return tasks

    def _truncate(self, request: DraftRequest) -> int:
        """Drop what differs from the request's tokens; return the number of its computed tokens.

        At least the last token is computed again, since the draft follows from it.
        """
        row = self._rows.setdefault(request.row, _Row(_NO_TOKENS, _NO_TOKENS))
        most = min(len(row.computed), len(request.token_ids) - 1)
        (differing,) = np.nonzero(row.computed[:most] != request.token_ids[:most])
        num_computed = int(differing[0]) if len(differing) else most
        row.computed, row.draft = row.computed[:num_computed], None
        return num_computed

    def _run(self, tasks: Sequence[_Task], drafts: dict[int, Draft | None]) -> None:
        """Compute one batch, and add its drafts by row."""
        try:
            found = self._model.run(self._batch(tasks))
        except Exception:
            for task in tasks:  # what is in their pages is unknown
                self.close(task.request.row)
            raise
        for i, task in enumerate(tasks):
            drafts[task.request.row] = self._finish(task, found, i)

    def _batch(self, tasks: Sequence[_Task]) -> DraftModelBatch:
        pages = [self._pages.of(task.request.row) for task in tasks]
        page_table = np.zeros((len(tasks), max(len(own) for own in pages)), dtype=np.int32)
        for table, own in zip(page_table, pages, strict=True):
            table[: len(own)] = own
        return DraftModelBatch(
            token_ids=np.concatenate([task.token_ids for task in tasks]),
            query_lens=np.array([task.num_tokens for task in tasks], dtype=np.int32),
            starts=np.array([task.num_computed for task in tasks], dtype=np.int32),
            limits=np.array([task.limit for task in tasks], dtype=np.int32),
            page_table=page_table,
        )

    def _finish(self, task: _Task, found: Continuations, i: int) -> Draft | None:
        """Note what a batch computed of a request; return its draft."""
        row, request = self._rows[task.request.row], task.request
        end = task.num_computed + task.num_tokens
        if not task.limit:
            row.computed = request.token_ids[:end].copy()
            return None
        token_ids = found.token_ids[i, : task.limit]
        row.known = request.token_ids.copy()
        row.computed = np.concatenate([row.known, token_ids[:-1]])
        probability = float(found.probabilities[i, : task.limit].mean())
        row.draft = Draft(token_ids, min(1.0, max(0.0, probability)))
        return row.draft
