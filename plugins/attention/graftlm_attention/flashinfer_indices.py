"""The pages that a batch's requests read, in the ragged format of FlashInfer's `plan`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import ForwardBatch

__all__ = ["RaggedPages", "on_host", "ragged_pages", "shared_pages", "shared_prefix"]

#: Number of page-table columns that the first comparison reads. It doubles after each comparison without a difference.
_FIRST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class RaggedPages:
    """The pages of n requests: request i reads indices[indptr[i] : indptr[i + 1]].

    A request reads its pages in full, except the last page, of which it reads `last_page_len[i]` tokens. FlashInfer
    reads `indptr` and `last_page_len` on the host. Both are computed there, without waiting for the device.

    Attributes:
        indptr: int32 [n + 1], on the host.
        indices: int32 [N], page ids; on the device.
        last_page_len: int32 [n], number of tokens in the last page, 1 to page_size; on the host.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def ragged_pages(
    batch: ForwardBatch, requests: slice, page_size: int, window: int | None = None, num_shared: int = 0
) -> RaggedPages:
    """Return the pages that some of a batch's requests read.

    Args:
        batch: the step's batch.
        requests: the range of requests.
        page_size: number of tokens in a page.
        window: sliding window in tokens, or None. Pages outside every query's window are left out. This does not change
            the mask, because the mask counts positions from a request's last token.
        num_shared: number of pages to leave out at the start of each request; ignored if `window` is set.
    """
    seq_lens = batch.seq_lens_cpu[requests].astype(np.int64)
    first_pages = np.full(len(seq_lens), num_shared, dtype=np.int64)
    if window is not None:
        first_positions = seq_lens - batch.query_lens_cpu[requests] - (window - 1)
        first_pages = np.maximum(first_positions, 0) // page_size
    end_pages = -(-seq_lens // page_size)
    indptr = np.zeros(len(seq_lens) + 1, dtype=np.int32)
    np.cumsum(end_pages - first_pages, out=indptr[1:])
    device = batch.page_table.device
    return RaggedPages(
        on_host(indptr, device),
        _compact(batch.page_table[requests], first_pages, indptr),
        on_host((seq_lens - (end_pages - 1) * page_size).astype(np.int32), device),
    )


def _compact(table: Tensor, first_columns: NDArray[np.int64], indptr: NDArray[np.int32]) -> Tensor:
    """Concatenate a table's rows, each one from its own first column on. Does not wait for the device.

    Args:
        table: int32 [n, P], page ids; on the device.
        first_columns: int64 [n], first column of each row.
        indptr: int32 [n + 1], start of each row's entries in the result.
    """
    total = int(indptr[-1])
    per_row = np.stack([np.diff(indptr), first_columns - indptr[:-1]])
    counts, shifts = on_host(per_row, table.device).to(table.device, non_blocking=True)
    rows = torch.repeat_interleave(counts, output_size=total)
    columns = torch.arange(total, device=table.device) + shifts[rows]
    return table[rows, columns]


def shared_pages(batch: ForwardBatch, page_size: int) -> int:
    """Return the number of leading pages that all requests share and that contain no token of this step."""
    past_lens = batch.seq_lens_cpu - batch.query_lens_cpu
    num_pages = int(past_lens.min()) // page_size
    table = batch.page_table_cpu[:, :num_pages]
    start, num_columns = 0, _FIRST_COLUMNS
    while start < num_pages:
        block = table[:, start : start + num_columns]
        same = (block[1:] == block[0]).all(axis=0)
        if not same.all():
            return start + int(same.argmin())
        start, num_columns = start + num_columns, 2 * num_columns
    return num_pages


def shared_prefix(batch: ForwardBatch, num_shared: int, page_size: int) -> RaggedPages:
    """Return the first `num_shared` pages, which all requests share, as the pages of a single request."""
    device = batch.page_table.device
    return RaggedPages(
        on_host(np.array([0, num_shared], dtype=np.int32), device),
        batch.page_table[0, :num_shared].contiguous(),
        on_host(np.array([page_size], dtype=np.int32), device),
    )


def on_host(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a host tensor; pinned for a CUDA device, so that copies to the device are asynchronous."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
