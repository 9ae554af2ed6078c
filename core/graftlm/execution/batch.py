"""From a step plan, numpy on the host, to a forward batch, tensors on the device."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import ForwardBatch
from graftlm.plan import StepPlan, WindowTables

__all__ = ["build_batch", "to_device"]


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device: on the CPU a view, elsewhere an asynchronous copy from pinned memory."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    # What is not contiguous would go through pageable memory.
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)


def build_batch(
    plan: StepPlan, last_tokens: Tensor, device: torch.device, *, selects_tokens: bool = False
) -> ForwardBatch:
    """Build a step's batch.

    Args:
        last_tokens: int64 [R], each row's latest sampled token, on the device.
        selects_tokens: only the hidden states of tokens that are sampled from are wanted; that of the first where none
            are.
    """
    num_requests = len(plan.query_lens)
    if num_requests == plan.num_tokens == len(plan.sample_idx):  # decoding, mostly: token i is request i's
        cu_seqlens_q = np.arange(num_requests + 1, dtype=np.int32)
        logits_idx = plan.sample_idx
    else:
        cu_seqlens_q = np.zeros(num_requests + 1, dtype=np.int32)
        token_ends = plan.query_lens.cumsum(out=cu_seqlens_q[1:])
        logits_idx = token_ends[plan.sample_idx].astype(np.int64) - 1
    logits_on_device = to_device(logits_idx, device)
    wanted_idx = (logits_on_device if len(logits_idx) else logits_on_device.new_zeros(1)) if selects_tokens else None
    batch = ForwardBatch(
        input_ids=_input_ids(plan, last_tokens, device),
        positions=to_device(plan.positions, device),
        out_slots=to_device(plan.out_slots, device),
        cu_seqlens_q=to_device(cu_seqlens_q, device),
        seq_lens=to_device(plan.seq_lens, device),
        page_table=to_device(plan.page_table, device),
        logits_idx=logits_on_device,
        num_decodes=plan.num_decodes,
        query_lens_cpu=plan.query_lens,
        seq_lens_cpu=plan.seq_lens,
        page_table_cpu=plan.page_table,
        wanted_idx=wanted_idx,
    )
    return batch if plan.window is None else replace(batch, window=_window_batch(batch, plan.window, device))


def _input_ids(plan: StepPlan, last_tokens: Tensor, device: torch.device) -> Tensor:
    """Return the step's tokens, those that only the device knows among them."""
    if len(plan.device_idx) == plan.num_tokens:
        return last_tokens.index_select(0, to_device(plan.rows, device))
    input_ids = to_device(plan.input_ids, device)
    if len(plan.device_idx):
        rows = plan.rows.repeat(plan.query_lens)[plan.device_idx]
        input_ids[to_device(plan.device_idx, device)] = last_tokens.index_select(0, to_device(rows, device))
    return input_ids


def _window_batch(batch: ForwardBatch, tables: WindowTables, device: torch.device) -> ForwardBatch:
    return replace(
        batch,
        out_slots=to_device(tables.out_slots, device),
        page_table=to_device(tables.page_table, device),
        page_table_cpu=tables.page_table,
    )
