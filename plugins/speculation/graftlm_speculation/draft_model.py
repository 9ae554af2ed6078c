"""Drafts from a smaller model, which generates greedily after each request's tokens.

The draft model computes the keys and values of a request's tokens, and stores them in a separate KV memory:

    tokens of the request     t0 t1 t2 t3 t4 t5
    computed by earlier calls t0 t1 t2 d3 d4         the drafted tokens d3 (accepted) and d4 (rejected) are included
    reused by this call       t0 t1 t2 t3            keys and values from the first different token on are overwritten
    computed by this call                 t4 t5 d6 d7   the last drafted token, d8, is only sampled
"""

from collections.abc import Mapping, Sequence
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
    """The draft model's state of one request.

    Attributes:
        token_ids: int32 [n], the request's tokens at the latest call, followed by `draft`.
        num_computed: number of leading tokens whose keys and values are in the row's pages.
        draft: the latest draft, or None.
    """

    token_ids: TokenIds
    num_computed: int = 0
    draft: Draft | None = None

    def num_shared(self, token_ids: TokenIds) -> int:
        """Return the number of leading tokens that this row and a request have in common."""
        most = min(len(self.token_ids), len(token_ids))
        differs = self.token_ids[:most] != token_ids[:most]
        return int(differs.argmax()) if differs.any() else most


@dataclass(frozen=True, slots=True)
class _Task:
    """The part of a request that one batch computes.

    Attributes:
        num_computed: number of the request's leading tokens whose keys and values are in memory.
        num_tokens: number of tokens to compute, at least 1.
        limit: number of tokens to draft; 0 if some of the request's tokens remain to be computed.
    """

    request: DraftRequest
    num_computed: int
    num_tokens: int
    limit: int

    @property
    def token_ids(self) -> TokenIds:
        token_ids = self.request.token_ids[self.num_computed : self.num_computed + self.num_tokens]
        return np.maximum(token_ids, 0)  # the draft model has no features for the ids of pictures


class DraftModelDrafter(Drafter):
    """A drafter that runs a draft model on batches of requests.

    A call computes at most `prefill_tokens` of the requests' tokens. Requests with the fewest missing tokens are
    computed first. A long prompt is computed over several calls, and only the last of these calls drafts for it. Each
    request's latest draft is stored: if the request continues with the draft's first tokens, the remaining tokens are
    returned without running the model.

    If the memory is full, the least recently drafted requests lose their keys and values. A request that is too long
    for the whole memory, or for the draft model's context, has no drafts and no pages.
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
        """Always true: a draft runs a model."""
        return True

    @property
    def num_free_pages(self) -> int:
        """Number of pages that no request uses."""
        return self._pages.num_free

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Return the draft model's greedy continuation of each request; None for a request without a draft."""
        drafts: dict[int, Draft | None] = {}
        num_shared: dict[int, int] = {}
        asked: list[DraftRequest] = []
        for request in requests:
            row = self._rows.get(request.row)
            num_shared[request.row] = shared = 0 if row is None else row.num_shared(request.token_ids)
            drafts[request.row] = None if row is None else self._kept_draft(request, row, shared)
            if not self._can_compute(request, shared):
                self.close(request.row)  # later calls cannot compute it either, and other requests need its pages
            elif drafts[request.row] is None:
                asked.append(request)
        tasks = self._tasks(self._placed(asked), num_shared)
        for at in range(0, len(tasks), self._model.max_rows):
            self._run(tasks[at : at + self._model.max_rows], drafts)
        return [drafts[request.row] for request in requests]

    def close(self, row: int) -> None:
        """Free a request's pages."""
        self._pages.release(row)
        self._rows.pop(row, None)

    def _kept_draft(self, request: DraftRequest, row: _Row, num_shared: int) -> Draft | None:
        """Return the remaining tokens of the latest draft if the request's new tokens are its first tokens, else None.

        The result may be one token shorter than a new draft. With overlap, the engine first requests a draft that
        starts with the token in flight, and later a draft after this token.
        """
        if row.draft is None or num_shared < len(request.token_ids):
            return None
        num_new = len(request.token_ids) - (len(row.token_ids) - len(row.draft.token_ids))
        rest = row.draft.token_ids[max(0, num_new) :]
        if num_new < 0 or len(rest) < max(1, min(request.limit, self._max_drafts) - 1):
            return None
        return Draft(rest[: request.limit], row.draft.confidence)

    def _can_compute(self, request: DraftRequest, num_shared: int) -> bool:
        """Return whether the draft model can compute a request, whose first `num_shared` tokens it has seen before."""
        token_ids = request.token_ids
        return len(token_ids) < self._max_len and bool((token_ids[num_shared:] < self._model.vocab_size).all())

    def _limit(self, request: DraftRequest) -> int:
        """Return the maximum length of the draft. Its last token is not computed, so it needs no slot in the memory."""
        room = self._max_len - len(request.token_ids) + 1
        return min(request.limit, self._max_drafts, room)

    def _placed(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Reserve pages for the requests' tokens and drafts; return the requests that got enough pages.

        Requests that already have pages are first, in order of their last use, most recent first. Each may take the
        pages of requests that come later in this order. A new request takes only free pages, and the pages of requests
        that are not in `requests`.
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

    def _tasks(self, requests: Sequence[DraftRequest], num_shared: Mapping[int, int]) -> list[_Task]:
        """Return this call's tasks, at most `prefill_tokens` tokens in total. Fewest missing tokens come first.

        Args:
            num_shared: row -> number of leading tokens that are the same as in the latest call.
        """
        missing = []
        for request in requests:
            num_computed = self._truncate(request, num_shared[request.row])
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

    def _truncate(self, request: DraftRequest, num_shared: int) -> int:
        """Drop the computed tokens that are not the request's. Return the number of remaining ones.

        At least the request's last token is computed again, because the draft is sampled after it.
        """
        row = self._rows.setdefault(request.row, _Row(_NO_TOKENS))  # new if the row has lost its pages
        row.num_computed = min(row.num_computed, num_shared, len(request.token_ids) - 1)
        row.draft = None
        return row.num_computed

    def _run(self, tasks: Sequence[_Task], drafts: dict[int, Draft | None]) -> None:
        """Compute one batch, and add its drafts by row."""
        try:
            found = self._model.run(self._batch(tasks))
        except Exception:
            for task in tasks:  # the content of their pages is unknown
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
        """Record the tokens that a batch computed for a request; return the request's draft, or None."""
        row, request = self._rows[task.request.row], task.request
        end = task.num_computed + task.num_tokens
        if not task.limit:
            row.token_ids, row.num_computed = request.token_ids[:end].copy(), end
            return None
        token_ids = found.token_ids[i, : task.limit]
        row.token_ids, row.num_computed = np.concatenate([request.token_ids, token_ids]), end + len(token_ids) - 1
        probability = float(found.probabilities[i, : task.limit].mean())
        row.draft = Draft(token_ids, min(1.0, max(0.0, probability)))
        return row.draft
