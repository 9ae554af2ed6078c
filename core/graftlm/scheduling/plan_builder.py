"""The arrays of a step plan, from the rows and chunks that take part."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import StepCopies
from graftlm.memory import RequestTable, RowWindows
from graftlm.plan import LateMask, PoolSpan, PromptLogprobSpan, RowSetup, StepPlan, WindowTables
from graftlm.scheduling.request import Request

__all__ = ["Chunk", "build_plan"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start : end of a request whose values the host knows.

    Attributes:
        reads: positions whose prompt log-probabilities, or whose hidden states, are wanted.
    """

    request: Request
    row: int
    start: int
    end: int
    reads: range = range(0)


def _no_copies(out_slots: NDArray[np.int64]) -> StepCopies | None:
    return None


def build_plan(
    step_id: int,
    table: RequestTable,
    page_size: int,
    decode_rows: NDArray[np.int32],
    chunks: list[Chunk],
    setups: tuple[RowSetup, ...],
    windows: RowWindows | None = None,
    take_copies: Callable[[NDArray[np.int64]], StepCopies | None] = _no_copies,
) -> StepPlan:
    """Lay out one step: the rows that decode, then the chunks, one-token chunks first.

    Args:
        windows: the rows' window pages, when sliding-window layers have a memory of their own.
        take_copies: from the slots that the step writes, int64 [T], to the copies that go with it.

    Effects: counts the decoding rows' tokens as computed. (Chunks were counted when their pages were reserved.)
    """
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
    out_slots = out_pages.astype(np.int64) * page_size + offsets
    page_table = table.page_table[rows, : int(table.num_pages[rows].max())]
    sample_idx = np.flatnonzero(ends == table.known[rows])
    prompt_spans, pool_spans = _spans(chunks, token_starts[num_decodes:])
    if pool_spans:  # a request for an embedding has caught up too, but may not generate
        sampling = rows[sample_idx]
        sample_idx = sample_idx[table.known[sampling] < table.limit[sampling]]
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
        sample_positions=ends[sample_idx],
        setups=setups,
        prompt_spans=prompt_spans,
        pool_spans=pool_spans,
        token_mask=_token_mask(table, rows[sample_idx]),
        window=None
        if windows is None
        else WindowTables(
            page_table=windows.page_table[rows, : page_table.shape[1]],
            out_slots=windows.pages.writable(out_pages).astype(np.int64) * page_size + offsets,
        ),
        copies=take_copies(out_slots),
    )


def _input_ids(num_decodes: int, chunks: list[Chunk], num_tokens: int) -> NDArray[np.int64]:
    input_ids = np.zeros(num_tokens, dtype=np.int64)
    at = num_decodes
    for chunk in chunks:
        input_ids[at : at + chunk.end - chunk.start] = chunk.request.token_ids[chunk.start : chunk.end]
        at += chunk.end - chunk.start
    return input_ids


def _token_mask(table: RequestTable, sampling_rows: NDArray[np.int32]) -> LateMask | None:
    idx = np.flatnonzero(table.constrained[sampling_rows])
    return LateMask(idx) if len(idx) else None


def _spans(
    chunks: list[Chunk], token_starts: NDArray[np.int64]
) -> tuple[tuple[PromptLogprobSpan, ...], tuple[PoolSpan, ...]]:
    """Return what is to be read of the chunks beside samples, given where each chunk begins among the step's tokens."""
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
            pool_spans.append(PoolSpan(chunk.row, start, len(chunk.reads), is_last))
    return tuple(prompt_spans), tuple(pool_spans)


def _prompt_span(chunk: Chunk, start: int) -> PromptLogprobSpan:
    first, last = chunk.reads.start, chunk.reads.stop
    return PromptLogprobSpan(
        row=chunk.row,
        start=start,
        targets=chunk.request.prompt_token_ids[first + 1 : last + 1].astype(np.int64),
        num_top=chunk.request.params.prompt_logprobs or 0,
    )
