from dataclasses import fields

import numpy as np
import pytest
import torch

from graftlm.execution.decode_inputs import DecodeInputs, DecodeShape
from graftlm.plan import StepPlan, WindowTables

CPU = torch.device("cpu")
SPARE = (90, 70)
SHAPE = DecodeShape(num_rows=5, max_size=8, max_pages=6, page_size=4, spare_pages=SPARE)


def plan_of(rows, known, window=True):
    """Return a step of one-token requests; a token None is known only on the device."""
    count = len(rows)
    seq_lens = np.arange(5, 5 + count, dtype=np.int32)
    table = np.arange(count * 3, dtype=np.int32).reshape(count, 3)
    return StepPlan(
        step_id=0,
        rows=np.array(rows, dtype=np.int32),
        query_lens=np.ones(count, dtype=np.int32),
        seq_lens=seq_lens,
        page_table=table,
        input_ids=np.array([0 if token is None else token for token in known]),
        device_idx=np.array([i for i, token in enumerate(known) if token is None], dtype=np.int64),
        positions=seq_lens.astype(np.int64) - 1,
        out_slots=np.arange(20, 20 + count),
        num_decodes=count,
        sample_idx=np.arange(count),
        sample_positions=seq_lens.astype(np.int64),
        window=WindowTables(table + 40, np.arange(60, 60 + count)) if window else None,
    )


@pytest.fixture
def inputs():
    made = DecodeInputs(SHAPE, CPU)
    made.last_tokens.copy_(torch.arange(100, 105))
    return made


def test_requests_come_first_and_padding_uses_the_spare_page(inputs):
    batch = inputs.fill(plan_of([4, 0, 2], [None, 7, None]), 5)
    inputs.gather(5)
    assert batch.input_ids.tolist() == [104, 7, 102, 100, 100]
    assert batch.positions.tolist() == [4, 5, 6, 0, 0]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [5, 6, 7, 1, 1]
    assert batch.out_slots.tolist() == [20, 21, 22, 360, 360]
    assert batch.page_table[:, :3].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [90] * 3, [90] * 3]
    assert batch.page_table_cpu.tolist() == batch.page_table[:, :3].tolist()
    assert batch.page_table.shape == (5, SHAPE.max_pages)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.query_lens_cpu.tolist() == [1] * 5
    assert (batch.num_decodes, batch.num_tokens, batch.num_requests) == (5, 5, 5)


def test_windows_have_their_own_slots_and_pages(inputs):
    window = inputs.fill(plan_of([1, 3], [None, None]), 4).window
    assert window.out_slots.tolist() == [60, 61, 280, 280]
    assert window.page_table[:, :3].tolist() == [[40, 41, 42], [43, 44, 45], [70] * 3, [70] * 3]
    assert window.page_table_cpu.tolist() == window.page_table[:, :3].tolist()
    assert window.seq_lens.tolist() == [5, 6, 1, 1]


def test_without_a_window_memory_there_is_no_window_batch():
    inputs = DecodeInputs(DecodeShape(5, 8, 6, 4, SPARE[:1]), CPU)
    assert inputs.fill(plan_of([1, 3], [None, None], window=False), 4).window is None


def test_a_smaller_step_keeps_no_data_of_a_larger_one(inputs):
    inputs.fill(plan_of([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]), 8)
    batch = inputs.fill(None, 8)
    inputs.gather(8)
    assert batch.out_slots.unique().tolist() == [360]
    assert batch.seq_lens.unique().tolist() == [1]
    assert batch.page_table[:, 0].unique().tolist() == [90]
    assert batch.input_ids.unique().tolist() == [100]


def test_tensors_keep_their_addresses(inputs):
    def addresses(batch):
        tensors = [getattr(batch, field.name) for field in fields(batch)]
        return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]

    first = inputs.fill(plan_of([4, 0, 2], [None, 7, None]), 4)
    second = inputs.fill(plan_of([1], [None]), 4)
    assert addresses(first) == addresses(second)
    assert addresses(first.window) == addresses(second.window)
