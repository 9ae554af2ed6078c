from itertools import pairwise

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from graftlm.contracts import StepCopies
from graftlm.errors import GraphCaptureError
from graftlm.execution.decode_inputs import DecodeInputs, DecodeShape
from graftlm.execution.graphs import DecodeGraphs, EagerCapture, graph_sizes
from graftlm.plan import StepPlan

CPU = torch.device("cpu")


class Prepared:
    """A backend that records the batch sizes that it was prepared for."""

    def __init__(self):
        self.sizes = []

    def prepare(self, batch):
        self.sizes.append(batch.num_requests)


def plan_of(tokens, lens=None):
    count = len(tokens)
    lens = np.ones(count, dtype=np.int32) if lens is None else np.array(lens, dtype=np.int32)
    num_tokens = int(lens.sum())
    return StepPlan(
        step_id=0,
        rows=np.arange(count, dtype=np.int32),
        query_lens=lens,
        seq_lens=lens,
        page_table=np.zeros((count, 2), dtype=np.int32),
        input_ids=np.resize(np.array(tokens), num_tokens),
        device_idx=np.empty(0, dtype=np.int64),
        positions=np.zeros(num_tokens, dtype=np.int64),
        out_slots=np.arange(num_tokens),
        num_decodes=int((lens == 1).sum()),
        sample_idx=np.arange(count),
        sample_positions=np.ones(count, dtype=np.int64),
    )


def make(sizes=(1, 2, 8), backend=None, capture=None, on_size=lambda size: None):
    inputs = DecodeInputs(DecodeShape(8, max(sizes), 4, 1, (9,)), CPU)
    backend = Prepared() if backend is None else backend
    forward = lambda batch: torch.stack([batch.input_ids.float(), batch.out_slots.float()], dim=1)  # noqa: E731
    return DecodeGraphs(inputs, sizes, backend, forward, capture or EagerCapture(), on_size)


@pytest.mark.parametrize(
    ("max_requests", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_the_largest_graph_size_is_the_maximum_of_running_requests(max_requests, sizes):
    assert graph_sizes(max_requests) == sizes


def test_large_batches_are_padded_by_at_most_an_eighth_and_the_largest_are_not_captured():
    sizes = graph_sizes(65536)
    assert sizes[-1] == 512
    assert len(sizes) < 50
    assert all(later - 1 <= earlier * 1.125 for earlier, later in pairwise(sizes) if earlier >= 64)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 8), (8, 8)])
def test_a_step_runs_in_the_smallest_captured_batch_that_fits(count, size):
    backend = Prepared()
    graphs = make(backend=backend)
    hidden = graphs.replay(plan_of(list(range(30, 30 + count))))
    assert hidden.tolist() == [[30 + i, i] for i in range(count)]
    assert backend.sizes[-1] == size
    assert graphs.num_replays == 1


@pytest.mark.parametrize(
    "plan",
    [
        plan_of([1, 2, 3], lens=[1, 1, 4]),
        plan_of(list(range(9))),
        replace(plan_of([1]), copies=StepCopies()),
    ],
    ids=["a chunk", "too many", "copies"],
)
def test_other_steps_run_without_a_graph(plan):
    graphs = make()
    assert graphs.replay(plan) is None
    assert graphs.num_replays == 0


def test_a_step_with_drafts_runs_as_one_request_per_token():
    batches = []

    class Backend(Prepared):
        def prepare(self, batch):
            super().prepare(batch)
            batches.append(batch)

    plan = replace(
        plan_of([7, 30, 31, 40], lens=[1, 3]),
        rows=np.array([5, 2], dtype=np.int32),
        positions=np.array([11, 4, 5, 6]),
        seq_lens=np.array([12, 7], dtype=np.int32),
        page_table=np.array([[1, 2], [3, 4]], dtype=np.int32),
        device_idx=np.array([0]),
        num_drafts=np.array([0, 2], dtype=np.int32),
    )
    graphs = make(backend=Backend())
    graphs.last_tokens[5] = 70
    hidden = graphs.replay(plan)
    assert hidden.tolist() == [[70, 0], [30, 1], [31, 2], [40, 3]]
    batch = batches[-1]
    assert batch.num_decodes == batch.num_requests == 8
    assert batch.seq_lens_cpu[:4].tolist() == batch.seq_lens[:4].tolist() == [12, 5, 6, 7]
    assert batch.page_table_cpu[:4].tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]
    assert batch.positions[:4].tolist() == [11, 4, 5, 6]


def test_the_largest_size_is_captured_first():
    heard = []
    make(on_size=heard.append)
    assert heard == [8, 2, 1]


def test_a_failed_capture_raises():
    class Refusing:
        def capture(self, function):
            raise GraphCaptureError("no")

    with pytest.raises(GraphCaptureError):
        make(capture=Refusing())
