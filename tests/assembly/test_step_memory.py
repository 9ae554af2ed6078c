"""The steps that are run to measure memory; only a GPU test measures the memory itself."""

import logging
import weakref

import numpy as np
import pytest
import torch

from graftlm import EngineConfig
from graftlm.assembly.assemble import assemble
from graftlm.assembly.step_memory import CudaMeter, LargestSteps, StepMemory, measure_steps, meter_for
from graftlm.contracts import AttentionContext, AttentionLayer, Platform
from graftlm.errors import InvariantError
from graftlm.registry import Registry

CPU = torch.device("cpu")
LAYER = AttentionLayer(0, num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)


class RecordingModel:
    """A model and backend with one layer that record their batches."""

    attention_layers = (LAYER,)
    state_layers = ()

    def __init__(self):
        self.batches, self.prepared, self.rows = [], [], []

    def bind_attention(self, backend):
        self.bound = backend

    def prepare(self, batch):
        self.prepared.append(batch)

    def forward(self, batch):
        assert self.prepared[-1] is batch
        self.batches.append(batch)
        return torch.zeros(batch.num_tokens, 3)

    def logits(self, hidden):
        self.rows.append(len(hidden))
        return torch.zeros(len(hidden), 70)


class Meter:
    """Reports 1,000 bytes more for each measured call."""

    def __init__(self):
        self.answer = 0

    def peak_bytes(self, function):
        function()
        self.answer += 1000
        return self.answer


def measured(**changes):
    sizes = {"num_rows": 8, "prefill_tokens": 100, "context_len": 40, "page_size": 16, "graph_sizes": (1, 2, 8)}
    model, stores = RecordingModel(), []

    def make_attention(kv):
        stores.append(kv)
        return model

    found = measure_steps(
        LargestSteps(**sizes | changes), model, model.attention_layers, make_attention, torch.float32, CPU, Meter()
    )
    (store,) = stores
    return found, model, store


def test_the_largest_prompt_step_and_graph_step_are_run():
    found, model, store = measured()
    prompts, decodes = model.batches
    assert prompts.query_lens_cpu.tolist() == [28, 40, 40]
    assert (decodes.query_lens_cpu.tolist(), decodes.num_decodes) == ([1] * 8, 8)
    assert model.rows == [8]  # a graph ends before the logits are computed
    tables = 3 * 8 * 3 * 4  # inputs copied, requests, pages, bytes
    assert found == StepMemory(activation_bytes=1000, graph_bytes=2000 + tables + 3 * (8 << 20))
    assert found.num_bytes == found.activation_bytes + found.graph_bytes
    assert store.num_pages >= 8


def test_the_memory_of_a_measurement_is_freed():
    kept = []
    model = RecordingModel()
    steps = LargestSteps(num_rows=2, prefill_tokens=8, context_len=8, page_size=1, graph_sizes=())
    measure_steps(
        steps,
        model,
        model.attention_layers,
        lambda kv: kept.append(weakref.ref(kv)) or Holder(kv, model),
        torch.float32,
        CPU,
        Meter(),
    )
    assert kept[0]() is None
    with pytest.raises(InvariantError, match="a measurement that has ended"):
        model.bound.prepare(model.batches[0])


class Holder:
    """A backend that keeps a reference to the memory it was created with."""

    def __init__(self, kv, model):
        self.kv, self.prepare = kv, model.prepare


def test_without_graphs_no_graph_step_is_run():
    found, model, _ = measured(graph_sizes=())
    assert len(model.batches) == 1
    assert found == StepMemory(activation_bytes=1000)


@pytest.mark.parametrize(("page_size", "context_len"), [(1, 40), (16, 40), (16, 32), (64, 1000)])
def test_measured_batches_use_distinct_slots_that_exist(page_size, context_len):
    _, model, store = measured(page_size=page_size, context_len=context_len)
    for batch in model.batches:
        slots = batch.out_slots.numpy()
        assert len(np.unique(slots)) == batch.num_tokens
        assert slots.max() < store.num_pages * page_size
        assert int(batch.page_table.max()) < store.num_pages
        for b in range(batch.num_requests):
            first, end = batch.cu_seqlens_q[b : b + 2].tolist()
            positions = batch.positions[first:end]
            assert positions.tolist() == list(range(end - first))
            pages = batch.page_table[b][positions // page_size]
            assert (pages * page_size + positions % page_size).tolist() == slots[first:end].tolist()


def test_a_real_model_and_backend_run_the_steps(checkpoint, caplog):
    config = EngineConfig.load(
        {
            "model": {"path": str(checkpoint("mistral")), "dtype": "float32", "device": "cpu", "native_ops": False},
            "memory": {"kv_tokens": 64},
        }
    )
    registry = Registry.load(config.plugins)
    with caplog.at_level(logging.INFO, logger="graftlm"):
        parts = assemble(config, registry, Platform("cpu"))
    parts.loop.close()
    assert "KV memory: 64 tokens of 512 bytes, set by memory.kv_tokens" in caplog.text
    model, provider = parts.device_parts.model, registry.provider("attention", "torch_native")
    stores = []

    def make_attention(kv):
        stores.append(kv)
        context = AttentionContext(model.attention_layers, kv, 16, CPU, torch.float32, 8, 40)
        return registry.create("attention", provider, {"kernel": "torch"}, context)

    steps = LargestSteps(num_rows=4, prefill_tokens=50, context_len=40, page_size=16, graph_sizes=(1, 4))
    found = measure_steps(steps, model, model.attention_layers, make_attention, torch.float32, CPU, Meter())
    assert found.activation_bytes == 1000
    written = stores[0].keys(0).flatten(0, 1)[:14]  # slots of the first request
    assert written.isfinite().all()
    assert written.count_nonzero() > 0


def test_nothing_is_measured_on_a_cpu():
    assert meter_for(CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_meter_counts_memory_that_is_already_freed():
    device = torch.device("cuda")

    def allocate():
        kept = torch.empty(3 << 20, dtype=torch.uint8, device=device)
        torch.empty(5 << 20, dtype=torch.uint8, device=device)
        return kept

    assert 8 << 20 <= CudaMeter(device).peak_bytes(allocate) < 20 << 20


@pytest.mark.parametrize(("num_drafted", "num_sampled"), [(0, 8), (50, 58), (300, 308)])
def test_a_token_is_sampled_after_each_drafted_token(num_drafted, num_sampled):
    _, model, _ = measured(num_drafted=num_drafted)
    assert model.rows == [num_sampled]


def test_the_keys_of_a_draft_head_are_computed_for_all_tokens():
    class Head:
        hidden_layers = ()

        def features(self, hidden):
            self.hidden = hidden
            return hidden[:, :2]

        def keys_and_values(self, features, token_ids, positions):
            self.sizes = len(features), len(token_ids), len(positions)

    head, model = Head(), RecordingModel()
    steps = LargestSteps(num_rows=2, prefill_tokens=8, context_len=20, page_size=1, graph_sizes=())
    measure_steps(steps, model, model.attention_layers, lambda kv: model, torch.float32, CPU, Meter(), head)
    assert head.sizes == (10, 10, 10)
