"""Builds step plans from decode rows and chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import StateSegments, StepCopies
from graftlm.memory import RequestTable, RowStates, RowWindows
from graftlm.plan import LateMask, MediaWork, PoolSpan, PromptLogprobSpan, RowSetup, StepPlan, WindowTables
from graftlm.scheduling.chunk_features import decode_rope_positions, feature_spans, rope_positions
from graftlm.scheduling.request import Request
from graftlm.types import TokenIds

__all__ = ["FEW_ROWS", "Chunk", "DecodeRows", "build_plan", "media_plan"]

#: Up to this number of rows, a Python loop over rows is faster than numpy calls.
FEW_ROWS: Final = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of a request, start : end, whose values are known on the host.

    Attributes:
        reads: positions whose prompt log-probabilities or hidden states are read.
        drafts: int32 [n], the drafted tokens at the end of the chunk; None without drafts.
    """

    request: Request
    row: int
    start: int
    end: int
    reads: range = range(0)
    drafts: TokenIds | None = None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows and derived arrays. Plans share the arrays until a row is added or removed, and never write them.

    Attributes:
        rows, query_lens: int32 [B].
        input_ids: int64 [B], placeholders; the runner replaces them by the latest sampled tokens.
        idx: int64 [B], the numbers 0 to B - 1.
        masked_idx: int64 [M], indices of the rows with a grammar.
        adapter_slots: see `StepPlan`.
    """

    rows: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    input_ids: NDArray[np.int64]
    idx: NDArray[np.int64]
    masked_idx: NDArray[np.int64]
    adapter_slots: NDArray[np.int32] | None

    @classmethod
    def of(cls, rows: NDArray[np.int32], table: RequestTable) -> Self:
        """Build the arrays of some rows."""
        num_rows = len(rows)
        return cls(
            rows,
            np.ones(num_rows, dtype=np.int32),
            np.zeros(num_rows, dtype=np.int64),
            np.arange(num_rows),
            np.flatnonzero(table.constrained[rows]),
            _adapter_slots(table, rows),
        )


def _no_copies(out_slots: NDArray[np.int64]) -> StepCopies | None:
    return None


def build_plan(
    step_id: int,
    table: RequestTable,
    page_size: int,
    decoding: DecodeRows,
    chunks: list[Chunk],
    setups: tuple[RowSetup, ...],
    windows: RowWindows | None = None,
    take_copies: Callable[[NDArray[np.int64]], StepCopies | None] = _no_copies,
    states: RowStates | None = None,
    media_work: MediaWork | None = None,
) -> StepPlan:
    """Build the plan of one step: the decode rows, then the chunks, with one-token chunks first.

    Args:
        windows: the rows' window pages, if sliding-window layers have their own memory; else None.
        take_copies: function from the slots that the step writes, int64 [T], to the copies that run with the step.
        states: the rows' recurrent states, with the segments of the chunks; None if the model has no such states.
        media_work: features to compute and to delete; None without pictures.

    Effects: increases `computed` of decode rows, and `known` of all rows that sample, by one. `computed` of chunks was
        increased when their pages were reserved. Drafts are not counted in either.
    """
    if not chunks:
        return _decode_plan(step_id, table, page_size, decoding, setups, windows, take_copies, states, media_work)
    decode_rows = decoding.rows
    chunks = sorted(chunks, key=lambda c: c.end - c.start > 1)
    num_decodes = len(decode_rows)
    rows = np.concatenate((decode_rows, np.array([c.row for c in chunks], dtype=np.int32)))
    starts = np.concatenate((table.computed[decode_rows], np.array([c.start for c in chunks], dtype=np.int64)))
    table.computed[decode_rows] += 1
    ends = np.concatenate((starts[:num_decodes] + 1, np.array([c.end for c in chunks], dtype=np.int64)))
    query_lens = ends - starts
    token_ends = np.cumsum(query_lens)
    token_starts = token_ends - query_lens
    positions = np.arange(token_ends[-1]) + np.repeat(starts - token_starts, query_lens)
    token_rows = np.repeat(rows, query_lens)
    out_pages, offsets = table.page_table[token_rows, positions // page_size], positions % page_size
    out_slots = _slots(out_pages, offsets, page_size)
    page_table = table.page_table[rows, : int(table.num_pages[rows].max())]
    num_drafts = _num_drafts(num_decodes, chunks)
    known_ends = ends if num_drafts is None else ends - num_drafts
    sample_idx = np.flatnonzero(known_ends == table.known[rows])
    prompt_spans, pool_spans = _spans(chunks, token_starts[num_decodes:])
    chunk_starts = token_starts[num_decodes:].tolist()
    if pool_spans:  # a pooling request must not sample after its last token
        sampling = rows[sample_idx]
        sample_idx = sample_idx[table.known[sampling] < table.limit[sampling]]
    sampling = rows[sample_idx]
    table.known[sampling] += 1
    table.on_device[sampling] = True
    sample_positions = ends[sample_idx]
    if num_drafts is not None:
        sample_idx, depths = _with_drafts(sample_idx, num_drafts)
        sampling = rows[sample_idx]
        sample_positions = known_ends[sample_idx] + depths
    return StepPlan(
        step_id=step_id,
        rows=rows,
        query_lens=query_lens.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        page_table=page_table,
        input_ids=_input_ids(num_decodes, chunks, int(token_ends[-1])),
        device_idx=np.arange(num_decodes),
        positions=positions,
        out_slots=out_slots,
        num_decodes=int(np.count_nonzero(query_lens == 1)),
        sample_idx=sample_idx,
        sample_positions=sample_positions,
        setups=setups,
        prompt_spans=prompt_spans,
        pool_spans=pool_spans,
        token_mask=_late_mask(np.flatnonzero(table.constrained[sampling])),
        window=_window_tables(windows, rows, page_table.shape[1], out_pages, offsets, page_size),
        copies=take_copies(out_slots),
        adapter_slots=_adapter_slots(table, rows),
        num_drafts=num_drafts,
        state=None if states is None else _state_segments(states, decode_rows, starts, chunks, token_starts),
        next_ids=_next_ids(num_decodes, chunks),
        feature_spans=feature_spans(chunks, chunk_starts),
        media_work=media_work,
        rope_positions=rope_positions(table, token_rows, positions, chunks, chunk_starts),
    )


def media_plan(step_id: int, media_work: MediaWork) -> StepPlan:
    """Build the plan of a step without requests, which computes only features of pictures."""
    none32, none64 = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
    return StepPlan(
        step_id=step_id,
        rows=none32,
        query_lens=none32,
        seq_lens=none32,
        page_table=np.empty((0, 1), dtype=np.int32),
        input_ids=none64,
        device_idx=none64,
        positions=none64,
        out_slots=none64,
        num_decodes=0,
        sample_idx=none64,
        sample_positions=none64,
        media_work=media_work,
    )


def _state_segments(
    states: RowStates,
    decode_rows: NDArray[np.int32],
    starts: NDArray[np.int64],
    chunks: list[Chunk],
    token_starts: NDArray[np.int64],
) -> StateSegments:
    """Return the segments of a step, given the first position and the first token's index of each row in the batch."""
    num_decodes = len(decode_rows)
    firsts = (token_starts - starts)[num_decodes:].tolist()
    first_token = {chunk.row: first for chunk, first in zip(chunks, firsts, strict=True)}
    return states.step(decode_rows, starts[:num_decodes], first_token)


def _num_drafts(num_decodes: int, chunks: list[Chunk]) -> NDArray[np.int32] | None:
    """Return the number of drafts of each request, int32 [B]; None if there are no drafts."""
    if all(chunk.drafts is None for chunk in chunks):
        return None
    return np.array([0] * num_decodes + [0 if c.drafts is None else len(c.drafts) for c in chunks], dtype=np.int32)


def _next_ids(num_decodes: int, chunks: list[Chunk]) -> NDArray[np.int64] | None:
    """Return the known token after each request's last token, int64 [B]; None if no chunk is followed by one."""
    if all(chunk.drafts is not None or chunk.end >= chunk.request.num_tokens for chunk in chunks):
        return None
    next_ids = np.zeros(num_decodes + len(chunks), dtype=np.int64)
    for i, chunk in enumerate(chunks, start=num_decodes):
        if chunk.drafts is None and chunk.end < chunk.request.num_tokens:
            next_ids[i] = max(0, int(chunk.request.token_ids[chunk.end]))
    return next_ids


def _with_drafts(
    sample_idx: NDArray[np.int64], num_drafts: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Add one sample per draft. Return the request of each sample, and the number of drafts before each sample."""
    counts = num_drafts[sample_idx].astype(np.int64) + 1
    ends = counts.cumsum()
    return sample_idx.repeat(counts), np.arange(ends[-1]) - (ends - counts).repeat(counts)


def _decode_plan(
    step_id: int,
    table: RequestTable,
    page_size: int,
    decoding: DecodeRows,
    setups: tuple[RowSetup, ...],
    windows: RowWindows | None,
    take_copies: Callable[[NDArray[np.int64]], StepCopies | None],
    states: RowStates | None,
    media_work: MediaWork | None,
) -> StepPlan:
    """Build the plan of a step with decode rows only. This most frequent kind needs a third of the numpy calls."""
    rows = decoding.rows
    advance = _advance_few if len(rows) <= FEW_ROWS else _advance
    positions, out_pages, num_columns = advance(table, page_size, rows)
    offsets = None if page_size == 1 else positions % page_size
    ends = positions + 1
    out_slots = _slots(out_pages, offsets, page_size)
    return StepPlan(
        step_id=step_id,
        rows=rows,
        query_lens=decoding.query_lens,
        seq_lens=ends.astype(np.int32),
        page_table=_copied_rows(table.page_table, rows, num_columns),
        input_ids=decoding.input_ids,
        device_idx=decoding.idx,
        positions=positions,
        out_slots=out_slots,
        num_decodes=len(rows),
        sample_idx=decoding.idx,
        sample_positions=ends,
        setups=setups,
        token_mask=_late_mask(decoding.masked_idx),
        window=_window_tables(windows, rows, num_columns, out_pages, offsets, page_size),
        copies=take_copies(out_slots),
        adapter_slots=decoding.adapter_slots,
        state=None if states is None else states.decode(rows, positions),
        media_work=media_work,
        rope_positions=decode_rope_positions(table, rows, positions),
    )


def _advance(
    table: RequestTable, page_size: int, rows: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Increase `computed` and `known` of each row by one.

    Returns: positions of the tokens to compute, int64 [B]; their pages, int32 [B]; and the largest page count of a row.
    """
    positions = table.computed[rows]
    table.computed[rows] = positions + 1
    table.known[rows] = positions + 2  # before, only the latest sample was to be computed
    out_pages = table.page_table[rows, positions if page_size == 1 else positions // page_size]
    return positions, out_pages, int(np.maximum.reduce(table.num_pages[rows]))


def _advance_few(
    table: RequestTable, page_size: int, rows: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Do the same as `_advance` in a Python loop, which is faster for few rows."""
    positions, out_pages, num_columns = [], [], 0
    for row in rows.tolist():
        position = int(table.computed[row])
        table.computed[row] = position + 1
        table.known[row] = position + 2
        positions.append(position)
        out_pages.append(table.page_table[row, position // page_size])
        num_columns = max(num_columns, int(table.num_pages[row]))
    return np.array(positions), np.array(out_pages), num_columns


def _copied_rows(page_table: NDArray[np.int32], rows: NDArray[np.int32], num_columns: int) -> NDArray[np.int32]:
    """Return some rows of the page table as a copy, because the table changes while the step runs."""
    if len(rows) == 1:  # a slice takes less than half of the time of an index array
        row = int(rows[0])
        return page_table[row : row + 1, :num_columns].copy()
    return page_table[rows, :num_columns]


def _window_tables(
    windows: RowWindows | None,
    rows: NDArray[np.int32],
    num_columns: int,
    out_pages: NDArray[np.int32],
    offsets: NDArray[np.int64] | None,
    page_size: int,
) -> WindowTables | None:
    """Return the page table and slots of the sliding-window layers."""
    if windows is None:
        return None
    return WindowTables(
        page_table=windows.page_table[rows, :num_columns],
        out_slots=_slots(windows.pages.writable(out_pages), offsets, page_size),
    )


def _slots(pages: NDArray[np.int32], offsets: NDArray[np.int64] | None, page_size: int) -> NDArray[np.int64]:
    """Return the slots of tokens from their pages and offsets in the pages; `offsets` is None with page size 1."""
    slots = pages.astype(np.int64)
    return slots if offsets is None else slots * page_size + offsets


def _input_ids(num_decodes: int, chunks: list[Chunk], num_tokens: int) -> NDArray[np.int64]:
    input_ids = np.zeros(num_tokens, dtype=np.int64)
    at = num_decodes
    for chunk in chunks:
        end = at + chunk.end - chunk.start
        if chunk.drafts is None:
            input_ids[at:end] = chunk.request.token_ids[chunk.start : chunk.end]
            if chunk.request.media is not None:
                np.maximum(input_ids[at:end], 0, out=input_ids[at:end])
        else:
            first_draft = end - len(chunk.drafts)
            input_ids[at:first_draft] = chunk.request.token_ids[chunk.start :]
            input_ids[first_draft:end] = chunk.drafts
        at = end
    return input_ids


def _late_mask(idx: NDArray[np.int64]) -> LateMask | None:
    return LateMask(idx) if len(idx) else None


def _adapter_slots(table: RequestTable, rows: NDArray[np.int32]) -> NDArray[np.int32] | None:
    slots = table.adapter_slot[rows] if table.num_adapted else None
    return slots if slots is not None and slots.any() else None


def _spans(
    chunks: list[Chunk], token_starts: NDArray[np.int64]
) -> tuple[tuple[PromptLogprobSpan, ...], tuple[PoolSpan, ...]]:
    """Return the log-probability spans and pooling spans of the chunks, given the index of each chunk's first token."""
    prompt_spans: list[PromptLogprobSpan] = []
    pool_spans: list[PoolSpan] = []
    for chunk, token_start in zip(chunks, token_starts.tolist(), strict=True):
        if not chunk.reads:
            continue
        start = token_start + chunk.reads.start - chunk.start
        if chunk.request.pooling is None:
            prompt_spans.append(_prompt_span(chunk, start))
        else:
            is_last = chunk.end == chunk.request.prompt_len
            pool_spans.append(PoolSpan(chunk.row, chunk.request.pooling, start, len(chunk.reads), is_last))
    return tuple(prompt_spans), tuple(pool_spans)


def _prompt_span(chunk: Chunk, start: int) -> PromptLogprobSpan:
    first, last = chunk.reads.start, chunk.reads.stop
    return PromptLogprobSpan(
        row=chunk.row,
        start=start,
        targets=chunk.request.shown_prompt[first + 1 : last + 1].astype(np.int64),
        num_top=chunk.request.params.prompt_logprobs or 0,
        requested=tuple(chunk.request.params.logprob_token_ids),
    )
