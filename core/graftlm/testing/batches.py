"""Builds a `ForwardBatch` from plain lists, for tests without a scheduler."""

from collections.abc import Sequence

import numpy as np
import torch

from graftlm.contracts import ForwardBatch, StateBatch, StateSegments

__all__ = ["make_batch", "make_state_batch"]


def make_batch(
    requests: Sequence[tuple[Sequence[int], int]],
    page_tables: Sequence[Sequence[int]],
    page_size: int,
    *,
    logits_idx: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> ForwardBatch:
    """Build a batch from the new tokens of each request.

    Args:
        requests: (token ids, position of the first token) of each request; requests with one token must be first.
        page_tables: page ids of each request, from position 0 on; at least ceil(context / page_size) ids.
        page_size: number of tokens in a page.
        logits_idx: indices of the tokens whose logits are computed; None: the last token of each request.
        device: device of the batch's tensors.

    Raises:
        ValueError: a request has no tokens or too few pages, or a one-token request follows a longer one.
    """
    query_lens = np.array([len(tokens) for tokens, _ in requests], dtype=np.int32)
    starts = np.array([start for _, start in requests], dtype=np.int32)
    seq_lens = starts + query_lens
    num_decodes = int((query_lens == 1).sum())
    _check(query_lens, seq_lens, num_decodes, page_tables, page_size)

    page_table = _pad_with_first(page_tables)
    positions = np.concatenate([np.arange(s, e, dtype=np.int64) for s, e in zip(starts, seq_lens, strict=True)])
    request_of_token = np.repeat(np.arange(len(requests)), query_lens)
    pages = page_table[request_of_token, positions // page_size].astype(np.int64)
    ends = np.cumsum(query_lens, dtype=np.int32)
    wanted = ends - 1 if logits_idx is None else np.asarray(logits_idx)

    def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype, copy=True)

    return ForwardBatch(
        input_ids=tensor(np.concatenate([np.asarray(tokens) for tokens, _ in requests]), torch.int64),
        positions=tensor(positions, torch.int64),
        out_slots=tensor(pages * page_size + positions % page_size, torch.int64),
        cu_seqlens_q=tensor(np.concatenate([[0], ends]), torch.int32),
        seq_lens=tensor(seq_lens, torch.int32),
        page_table=tensor(page_table, torch.int32),
        logits_idx=tensor(wanted, torch.int64),
        num_decodes=num_decodes,
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
        page_table_cpu=page_table,
    )


def make_state_batch(
    segments: Sequence[tuple[int, int, int, int]], num_decodes: int = 0, device: torch.device | str = "cpu"
) -> StateBatch:
    """Build the segments of a batch.

    Args:
        segments: (index of the first token, number of tokens, source, target) of each segment.
        num_decodes: see `StateSegments`.
        device: device of the batch's tensors.
    """
    starts, lens, sources, targets = np.array(segments, dtype=np.int32).reshape(-1, 4).T.copy()
    slots = [torch.from_numpy(column.astype(np.int64)).to(device) for column in (sources, targets)]
    return StateBatch(StateSegments(starts, lens, sources, targets, num_decodes), *slots)


def _check(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    num_decodes: int,
    page_tables: Sequence[Sequence[int]],
    page_size: int,
) -> None:
    if len(page_tables) != len(query_lens):
        raise ValueError(f"expected one page table for each of {len(query_lens)} requests, got {len(page_tables)}")
    if not query_lens.all():
        raise ValueError(f"every request needs at least one token, got {query_lens.tolist()} tokens")
    if (query_lens[:num_decodes] != 1).any():
        raise ValueError(f"requests with one token must be first, got {query_lens.tolist()} tokens")
    for b, (pages, seq_len) in enumerate(zip(page_tables, seq_lens, strict=True)):
        if len(pages) * page_size < seq_len:
            raise ValueError(f"request {b} has {seq_len} tokens of context but {len(pages)} pages of {page_size}")


def _pad_with_first(page_tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the page tables as int32 [B, P], each row padded with its first page."""
    width = max(len(pages) for pages in page_tables)
    rows = [list(pages) + [pages[0]] * (width - len(pages)) for pages in page_tables]
    return np.array(rows, dtype=np.int32)
