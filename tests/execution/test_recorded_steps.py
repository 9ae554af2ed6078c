"""Which steps are recorded and repeated, and which are not."""

import ctypes

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from graftlm.contracts import StateSegments, StepCopies
from graftlm.errors import GraphCaptureError
from graftlm.execution.recorded_steps import RecordedSteps, record
from graftlm.layers import call_native
from graftlm.layers.packing import OneDnnMatrix, can_pack
from graftlm.plan import StepPlan


def copied(x, call=call_native):
    """Copy with a compiled kernel whose writes PyTorch does not notice."""
    out = torch.empty_like(x)
    call(ctypes.memmove, out.data_ptr(), x.data_ptr(), x.nbytes)
    return out


def plan_of(tokens, lens=None):
    lens = np.ones(len(tokens), dtype=np.int32) if lens is None else np.array(lens, dtype=np.int32)
    num_tokens, count = int(lens.sum()), len(tokens)
    return StepPlan(
        step_id=0,
        rows=np.arange(count, dtype=np.int32),
        query_lens=lens,
        seq_lens=lens,
        page_table=np.zeros((count, 2), dtype=np.int32),
        input_ids=np.resize(np.array(tokens), num_tokens),
        device_idx=np.empty(0, dtype=np.int64),
        positions=np.arange(num_tokens),
        out_slots=np.arange(num_tokens),
        num_decodes=int((lens == 1).sum()),
        sample_idx=np.arange(count),
        sample_positions=np.ones(count, dtype=np.int64),
    )


class Backend:
    def __init__(self):
        self.num_prepared = 0

    def prepare(self, batch):
        self.num_prepared += 1


class Forward:
    """A model with two hidden numbers, which counts the runs of its Python code."""

    def __init__(self, body):
        self.num_calls = 0
        self._body = body

    def __call__(self, batch):
        self.num_calls += 1
        return self._body(torch.stack([batch.input_ids.float(), batch.positions.float()], dim=1))


def steps_of(body):
    forward = Forward(body)
    return RecordedSteps(Backend(), forward, num_rows=8), forward


def hidden_of(steps, tokens):
    hidden = steps.replay(plan_of(tokens))
    return None if hidden is None else hidden.tolist()


BODIES = {
    "operations": lambda x: (x + 1).mul_(2).sin() + x.sum(dim=1, keepdim=True),
    "kernels": lambda x: copied(copied(x) * 2)[:, :2],
    "results of several tensors": lambda x: torch.cat(torch.max(copied(x), dim=1, keepdim=True)[:1] * 2, dim=1),
    "in place": lambda x: copied(x).index_add_(0, torch.zeros(len(x), dtype=torch.int64), copied(x)),
    "narrower and back": lambda x: x.bfloat16().float() + torch.ones(2) + x.new_zeros(2),
    "some in place, some anew": lambda x: copied(
        torch.ops.aten._native_batch_norm_legit(
            copied(x), torch.ones(2), torch.zeros(2), torch.zeros(2), torch.ones(2), True, 0.1, 1e-5
        )[0]
    ),
    "part of a larger tensor": lambda x: copied(x.repeat(1, 3)[:, 1:3].t().contiguous()[1:]).t(),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_steps_are_repeated_without_the_models_python(body):
    steps, forward = steps_of(body)
    for tokens in ([3, 5, 7], [4, 1, 9], [2, 2, 8], [6, 0, 1], [5, 5, 5]):
        x = torch.stack([torch.tensor(tokens).float(), torch.arange(3).float()], dim=1)
        assert hidden_of(steps, tokens) == body(x).tolist()
    assert (forward.num_calls, steps.num_replays) == (2, 3)  # one recorded, one checked


def test_each_batch_size_and_thread_count_is_recorded_separately():
    steps, forward = steps_of(BODIES["kernels"])
    num_threads = torch.get_num_threads()
    try:
        for _ in range(3):
            for count, threads in ((1, num_threads), (2, num_threads), (2, num_threads + 1)):
                torch.set_num_threads(threads)
                assert hidden_of(steps, [9] * count) == [[18, 2 * i] for i in range(count)]
    finally:
        torch.set_num_threads(num_threads)
    assert (forward.num_calls, steps.num_replays) == (6, 3)


def test_a_step_with_other_weights_is_recorded_again():
    weight = torch.tensor(2.0)
    steps, forward = steps_of(lambda x: copied(x * weight))
    for _ in range(3):
        assert hidden_of(steps, [9]) == [[18, 0]]
    weight = torch.tensor(3.0)
    steps.recapture()
    assert hidden_of(steps, [9]) == [[27, 0]]
    assert forward.num_calls == 3


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"adapter_slots": np.zeros(2, dtype=np.int32)}, 2),
        ({"copies": StepCopies((), (), (), ())}, 2),
        ({}, 65),
    ],
    ids=["adapters", "pages on their way", "many requests"],
)
def test_other_steps_run_in_the_model(change, count):
    steps, forward = steps_of(BODIES["kernels"])
    assert steps.replay(replace(plan_of([3] * count), **change)) is None
    assert forward.num_calls == 0


def test_prompts_run_in_the_model():
    steps, forward = steps_of(BODIES["kernels"])
    assert steps.replay(plan_of([3, 4], lens=[1, 5])) is None
    assert forward.num_calls == 0


def test_alternating_batch_sizes_do_not_affect_each_other():
    steps, _ = steps_of(lambda x: copied(copied(x) + 1).mul(2))
    for _ in range(3):
        for count in (5, 1, 3, 8, 2):
            assert hidden_of(steps, range(count)) == [[2 * i + 2, 2 * i + 2] for i in range(count)]
    assert steps.num_replays == 5


def test_recordings_of_all_sizes_share_memory():
    """Steps of 33 to 64 requests take as much memory as one step of 64."""

    def forward(batch):
        x = batch.input_ids.float()[:, None].expand(-1, 64).contiguous()
        for _ in range(9):
            x = copied(x * 2)
        return x

    steps = RecordedSteps(Backend(), forward, num_rows=8)
    taken = set()
    for count in (64, *range(33, 65)):
        steps.replay(plan_of([1] * count))
        taken.add(sum(block.nbytes for block in steps._memory.blocks.values()))
    assert len(taken) == 1
    assert taken.pop() < 6 * 64 * 64 * 4


@pytest.mark.skipif(not can_pack(torch.float32), reason="oneDNN has no kernels here that gain from packing")
def test_products_with_packed_weights_are_repeated():
    packed = OneDnnMatrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    steps, _ = steps_of(lambda x: copied(packed(copied(x))))
    for _ in range(3):
        assert hidden_of(steps, [1, 2]) == [[1, 3], [4, 10]]
    assert steps.num_replays == 1


def test_nan_in_a_step_does_not_end_recording():
    """NaN occurs if one request's sums overflow, which is an error only of that request."""
    steps, forward = steps_of(lambda x: copied(copied(x).sqrt()))
    for tokens in ([4], [-4], [9]):
        steps.replay(plan_of(tokens))
    assert forward.num_calls == 3
    assert [hidden_of(steps, [16]), hidden_of(steps, [25])] == [[[4, 0]], [[5, 0]]]
    assert (forward.num_calls, steps.num_replays) == (3, 2)


def test_a_step_with_a_failing_kernel_runs_in_the_model():
    """The return value of a kernel says whether it could allocate memory, and the model handles a failure."""
    memory = [True] * 10

    def forward(x):
        out = torch.empty_like(x)

        def kernel(to, at, size):
            ctypes.memmove(to, at, size)
            return memory.pop()

        if not call_native(kernel, out.data_ptr(), x.data_ptr(), x.nbytes):
            raise MemoryError
        return out

    steps, _ = steps_of(forward)
    for _ in range(3):
        assert hidden_of(steps, [7]) == [[7, 0]]
    memory.append(False)
    assert hidden_of(steps, [7]) is None
    assert hidden_of(steps, [8]) == [[8, 0]]
    assert steps.num_replays == 2


@pytest.mark.parametrize("field", ["seq_lens", "page_table_cpu", "window"])
def test_a_model_that_reads_other_fields_of_the_batch_is_not_recorded(field):
    steps = RecordedSteps(Backend(), lambda batch: getattr(batch, field) is None or batch.positions, num_rows=8)
    assert steps.replay(plan_of([3, 5])) is None
    assert steps.replay(plan_of([3, 5])) is None


def test_a_model_may_read_fields_that_are_equal_for_all_batches_of_a_size():
    def forward(batch):
        assert (batch.num_requests, batch.num_tokens, batch.num_decodes, batch.in_graph) == (2, 2, 2, False)
        return copied(batch.input_ids.float())

    steps = RecordedSteps(Backend(), forward, num_rows=8)
    assert [hidden_of(steps, tokens) for tokens in ([3, 5], [1, 2], [7, 7])] == [[3, 5], [1, 2], [7, 7]]
    assert steps.num_replays == 1


def test_a_model_that_keeps_computed_tensors_is_not_recorded():
    kept = []

    def forward(x):
        kept[:] = [copied(x)]
        return copied(x)

    steps, _ = steps_of(forward)
    assert hidden_of(steps, [3]) is None
    assert hidden_of(steps, [4]) is None


UNREPEATABLE = {
    "a kernel that is not recorded": lambda x: copied(x, call=lambda function, *arguments: function(*arguments)),
    "a value taken out": lambda x: copied(x) * x.sum().item(),
    "as many rows as tensors say": lambda x: copied(x)[x[:, 0] > 0],
    "chance": lambda x: copied(x) + torch.rand(2),
    "a value that goes by PyTorch": lambda x: copied(x) + x[:, 0].tolist()[0],
}


@pytest.mark.parametrize("body", UNREPEATABLE.values(), ids=UNREPEATABLE.keys())
def test_a_model_that_cannot_be_repeated_is_never_recorded(body):
    steps, _ = steps_of(body)
    for tokens in ([3, 5], [7, 2], [1, 8], [6, 4]):
        hidden = hidden_of(steps, tokens)
        if hidden is not None:  # the first step runs in the model
            x = torch.stack([torch.tensor(tokens).float(), torch.arange(2).float()], dim=1)
            assert hidden == body(x).tolist()
    assert steps.num_replays == 0
    assert hidden_of(steps, [3, 5]) is None


def test_an_exception_while_recording_prevents_recording():
    def fail():
        raise ValueError("no step for you")

    with pytest.raises(GraphCaptureError, match="no step for you"):
        record(fail)


def test_memory_of_freed_tensors_is_reused():
    kept = []

    def chain():
        x = torch.ones(100)
        kept.append(copied(x))  # this tensor stays alive
        for _ in range(50):
            x = copied(x)

    recording = record(chain)
    assert 2 <= len(recording.memory.blocks) <= 4
    recording.memory.fill_nan()
    recording.repeat()
    assert kept[0].tolist() == [1] * 100


class Accumulator:
    """A model whose state is the sum of the row's tokens; its hidden states are the sums."""

    def __init__(self, fails=lambda: False):
        self.state = torch.zeros(6, 1)
        self.fails = fails

    def __call__(self, batch):
        sums = self.state.index_select(0, batch.state.sources) + batch.input_ids[:, None].float()
        self.state.index_copy_(0, batch.state.targets, sums)
        if self.fails():
            raise GraphCaptureError("a call that cannot be repeated")
        return copied(sums)

    def steps(self):
        return RecordedSteps(Backend(), self, num_rows=8, states=[[self.state]])


def state_plan(tokens, sources, targets, num_decodes=None):
    columns = [np.array(column, dtype=np.int32) for column in (range(len(tokens)), [1] * len(tokens), sources, targets)]
    num_decodes = len(tokens) if num_decodes is None else num_decodes
    return replace(plan_of(tokens), state=StateSegments(*columns, num_decodes))


def test_recorded_steps_read_and_write_the_slots_of_each_plan():
    model = Accumulator()
    steps = model.steps()
    slots = [([1, 2], [1, 2]), ([1, 2], [3, 2]), ([3, 2], [1, 4]), ([1, 4], [1, 2]), ([1, 2], [1, 2])]
    found = [steps.replay(state_plan([3, 5], *each)).flatten().tolist() for each in slots]
    assert found == [[3, 5], [6, 10], [9, 15], [12, 20], [15, 25]]
    assert steps.num_replays == 3


def test_a_state_is_restored_if_the_model_must_run_the_step_again():
    model = Accumulator(fails=lambda: True)
    assert model.steps().replay(state_plan([3, 5], [1, 2], [1, 2])) is None
    assert model.state.flatten().tolist() == [0] * 6
    runs = iter([False, True])  # recording succeeds, and the check fails
    model = Accumulator(fails=lambda: next(runs))
    steps = model.steps()
    assert steps.replay(state_plan([3], [1], [1])).item() == 3
    assert steps.replay(state_plan([4], [1], [1])) is None
    assert model.state[1].item() == 3


def test_a_row_that_reads_a_state_of_the_same_step_is_left_to_the_model():
    assert Accumulator().steps().replay(state_plan([3, 5], [1, 1], [1, 2], num_decodes=1)) is None
