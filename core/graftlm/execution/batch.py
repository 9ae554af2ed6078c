"""Builds a forward batch of device tensors from a step plan, which has numpy arrays on the host."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import ForwardBatch, StateBatch, StateSegments
from graftlm.plan import StepPlan, WindowTables

__all__ = ["BatchBuilder", "to_device"]


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor: a view on the CPU, or an asynchronous copy from pinned memory on a GPU."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    # An array that is not contiguous would first be copied to pageable memory.
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)


class BatchBuilder:
    """Builds the batches of steps. Tensors that consecutive steps share are copied to the device once.

    Args:
        last_tokens: int64 [R], each row's latest sampled token, on the device.
    """

    def __init__(self, last_tokens: Tensor) -> None:
        self._last_tokens = last_tokens
        self._device = last_tokens.device
        self._rows = np.empty(0, dtype=np.int32)
        self._rows_on_device = torch.empty(0, dtype=torch.int64)  # `_rows` on the device
        self._bounds = self._idx = torch.empty(0)  # cached for the batch size of the latest decode step

    def rows_on_device(self, rows: NDArray[np.int32]) -> Tensor:
        """Return rows as int64 on the device. The same array object returns the tensor of the previous call."""
        if rows is not self._rows:
            self._rows, self._rows_on_device = rows, to_device(rows.astype(np.int64), self._device)
        return self._rows_on_device

    def build(self, plan: StepPlan, *, selects_tokens: bool = False) -> ForwardBatch:
        """Build a step's batch.

        Args:
            selects_tokens: whether `wanted_idx` selects only the sampled tokens, or the first token if none is sampled.
        """
        device = self._device
        cu_seqlens_q, logits_idx = self._bounds_and_samples(plan)
        wanted_idx = (logits_idx if len(plan.sample_idx) else logits_idx.new_zeros(1)) if selects_tokens else None
        batch = ForwardBatch(
            input_ids=self._input_ids(plan),
            positions=to_device(plan.positions if plan.rope_positions is None else plan.rope_positions, device),
            out_slots=to_device(plan.out_slots, device),
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=to_device(plan.seq_lens, device),
            page_table=to_device(plan.page_table, device),
            logits_idx=logits_idx,
            num_decodes=plan.num_decodes,
            query_lens_cpu=plan.query_lens,
            seq_lens_cpu=plan.seq_lens,
            page_table_cpu=plan.page_table,
            wanted_idx=wanted_idx,
            state=None if plan.state is None else _state_batch(plan.state, device),
        )
        return batch if plan.window is None else replace(batch, window=_window_batch(batch, plan.window, device))

    def _bounds_and_samples(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Return `cu_seqlens_q` and `logits_idx`."""
        num_requests = len(plan.rows)
        if num_requests == plan.num_tokens == len(plan.sample_idx):  # usually decode: token i is that of request i
            if len(self._idx) != num_requests:
                self._bounds = to_device(np.arange(num_requests + 1, dtype=np.int32), self._device)
                self._idx = to_device(np.arange(num_requests), self._device)
            return self._bounds, self._idx
        cu_seqlens_q = np.zeros(num_requests + 1, dtype=np.int32)
        plan.query_lens.cumsum(out=cu_seqlens_q[1:])
        return to_device(cu_seqlens_q, self._device), to_device(plan.sample_token_idx, self._device)

    def _input_ids(self, plan: StepPlan) -> Tensor:
        """Return the step's tokens, including sampled tokens that are only on the device."""
        if len(plan.device_idx) == len(plan.input_ids):
            return self._last_tokens.index_select(0, self.rows_on_device(plan.rows))
        input_ids = to_device(plan.input_ids, self._device)
        if len(plan.device_idx):
            rows = to_device(plan.rows.repeat(plan.query_lens)[plan.device_idx], self._device)
            input_ids[to_device(plan.device_idx, self._device)] = self._last_tokens.index_select(0, rows)
        return input_ids


def _state_batch(segments: StateSegments, device: torch.device) -> StateBatch:
    slots = to_device(np.stack((segments.sources, segments.targets)).astype(np.int64), device)
    return StateBatch(segments, sources=slots[0], targets=slots[1])


def _window_batch(batch: ForwardBatch, tables: WindowTables, device: torch.device) -> ForwardBatch:
    return replace(
        batch,
        out_slots=to_device(tables.out_slots, device),
        page_table=to_device(tables.page_table, device),
        page_table_cpu=tables.page_table,
    )
