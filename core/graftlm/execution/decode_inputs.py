"""The input tensors of captured decode steps. Their addresses are fixed, and one copy per step fills them.

A captured batch consists of requests with one token. A request with drafts has several tokens in a step; it becomes one
request per token, with the same pages and increasing context lengths:

    request          tokens   positions        in the captured batch: pages, context length
    t7 d8 d9         3        7 8 9            (pages, 8), (pages, 9), (pages, 10)

All keys of a layer are written before attention begins, so each token attends to the drafts before it.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import ForwardBatch
from graftlm.plan import StepPlan, WindowTables

__all__ = ["DecodeInputs", "DecodeShape"]

_NUM_FIELDS = 3  # token ids, sources, positions; the slots of each memory follow


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Size limits of the inputs of decode steps.

    Attributes:
        num_rows: R, number of rows of the request table.
        max_size: N, maximum number of requests in one step.
        max_pages: P, number of columns of the page table.
        page_size: number of tokens in a page.
        spare_pages: ids of pages that no request owns: one page, and a second one in the memory of the sliding-window
            layers if it is separate.
    """

    num_rows: int
    max_size: int
    max_pages: int
    page_size: int
    spare_pages: tuple[int, ...]

    @property
    def num_memories(self) -> int:
        """Number of separate KV memories, M: 1 or 2."""
        return len(self.spare_pages)

    @property
    def num_words(self) -> int:
        """Number of 64-bit words of the inputs, without the page tables."""
        return (_NUM_FIELDS + self.num_memories) * self.max_size + -(-self.max_size // 2)


@dataclass(frozen=True, slots=True)
class _Host:
    """One step's inputs on the host, as views of the words that are copied.

        fields [3 + M, N] int64 | seq_lens [N] int32 | page tables [M, size, p] int32, p = columns of this step

    Attributes:
        words: int64, all inputs; pinned if the device is a GPU.
    """

    words: Tensor
    fields: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    tables: NDArray[np.int32]

    @classmethod
    def empty(cls, shape: DecodeShape, size: int, num_columns: int, pinned: bool) -> "_Host":
        num_entries = shape.num_memories * size * num_columns
        words = torch.empty(shape.num_words + -(-num_entries // 2), dtype=torch.int64, pin_memory=pinned)
        array = words.numpy()
        end = (_NUM_FIELDS + shape.num_memories) * shape.max_size
        return cls(
            words,
            fields=array[:end].reshape(-1, shape.max_size),
            seq_lens=array[end : shape.num_words].view(np.int32)[: shape.max_size],
            tables=array[shape.num_words :].view(np.int32)[:num_entries].reshape(-1, size, num_columns),
        )


class DecodeInputs:
    """The inputs of decode steps, padded to a fixed number of requests.

    A padding request has one token at position 0, on the spare page. An attention backend computes it like other
    requests; its result is not used.

    Tokens that are only on the device are in `last_tokens`; other tokens are copied with the step. One tensor contains
    both kinds, and a request's source is the index of its token in this tensor.

    Attributes:
        last_tokens: int64 [R], each row's latest sampled token.
    """

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        size = shape.max_size
        words = torch.zeros(shape.num_rows + shape.num_words, dtype=torch.int64, device=device)
        self.last_tokens = words[: shape.num_rows]
        self._words = words[shape.num_rows :]
        self._tokens = words[: shape.num_rows + size]  # `last_tokens`, then the tokens copied with the step
        end = (_NUM_FIELDS + shape.num_memories) * size
        self._fields = self._words[:end].view(-1, size)
        self._seq_lens = self._words[end:].view(torch.int32)[:size]
        self._tables = torch.zeros(shape.num_memories, size, shape.max_pages, dtype=torch.int32, device=device)
        self._input_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._logits_idx = torch.arange(size, device=device)

    def fill(self, plan: StepPlan | None, size: int) -> ForwardBatch:
        """Copy a step's inputs to the device tensors, with one asynchronous copy from the host.

        Args:
            plan: plan of a step without prefill and with at most `size` tokens; None: all requests are padding.
            size: number of requests in the padded batch, at most N.

        Returns: the padded batch. Its device tensors are the same in every step of this size; its host arrays are new.
        """
        host = self._on_host(plan, size)
        words = host.words.to(self._device, non_blocking=True)
        num_words, num_columns = self._shape.num_words, host.tables.shape[2]
        self._words.copy_(words[:num_words])
        tables = words[num_words:].view(torch.int32)[: host.tables.size].view(host.tables.shape)
        self._tables[:, :size, :num_columns].copy_(tables)
        return self._batch(host, size)

    def gather(self, size: int) -> None:
        """Write the token of each request to `input_ids`. This is part of the captured work."""
        torch.index_select(self._tokens, 0, self._fields[1, :size], out=self._input_ids[:size])

    def _on_host(self, plan: StepPlan | None, size: int) -> _Host:
        num_columns = 1 if plan is None else plan.page_table.shape[1]
        host = _Host.empty(self._shape, size, num_columns, pinned=self._device.type == "cuda")
        count = 0 if plan is None else plan.num_tokens
        if plan is not None:
            self._write(plan, host)
        spare_pages = np.array(self._shape.spare_pages)
        host.fields[:_NUM_FIELDS, count:size] = 0
        host.fields[_NUM_FIELDS:, count:size] = spare_pages[:, None] * self._shape.page_size
        host.seq_lens[count:size] = 1
        host.tables[:, count:] = spare_pages[:, None, None]
        return host

    def _write(self, plan: StepPlan, host: _Host) -> None:
        count = plan.num_tokens
        rows, seq_lens, tables = _by_token(plan)
        token_ids, sources, positions, *slots = host.fields[:, :count]
        token_ids[:] = plan.input_ids
        sources[:] = np.arange(self._shape.num_rows, self._shape.num_rows + count)
        sources[plan.device_idx] = rows[plan.device_idx]
        positions[:] = plan.positions if plan.rope_positions is None else plan.rope_positions
        host.seq_lens[:count] = seq_lens
        memories: list[StepPlan | WindowTables] = [plan] if plan.window is None else [plan, plan.window]
        for memory, own, out_slots, table in zip(memories, tables, slots, host.tables, strict=True):
            out_slots[:] = memory.out_slots
            table[:count] = own

    def _batch(self, host: _Host, size: int) -> ForwardBatch:
        batch = ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self._fields[2, :size],
            out_slots=self._fields[_NUM_FIELDS, :size],
            cu_seqlens_q=self._cu_seqlens_q[: size + 1],
            seq_lens=self._seq_lens[:size],
            page_table=self._tables[0, :size],
            logits_idx=self._logits_idx[:size],
            num_decodes=size,
            query_lens_cpu=np.ones(size, dtype=np.int32),
            seq_lens_cpu=host.seq_lens[:size],
            page_table_cpu=host.tables[0],
            in_graph=True,
        )
        if self._shape.num_memories == 1:
            return batch
        window = replace(
            batch,
            out_slots=self._fields[_NUM_FIELDS + 1, :size],
            page_table=self._tables[1, :size],
            page_table_cpu=host.tables[1],
        )
        return replace(batch, window=window)


def _by_token(plan: StepPlan) -> tuple[NDArray[np.int32], NDArray[np.int64], list[NDArray[np.int32]]]:
    """Return the row, the context length and the page tables of each of a step's tokens."""
    tables = [plan.page_table] if plan.window is None else [plan.page_table, plan.window.page_table]
    if plan.num_tokens == len(plan.rows):
        return plan.rows, plan.positions + 1, tables
    rows = plan.rows.repeat(plan.query_lens)
    return rows, plan.positions + 1, [table.repeat(plan.query_lens, axis=0) for table in tables]
