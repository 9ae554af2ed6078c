"""The engine's steps on a fake CUDA device: no call mixes devices, and no launch waits for the device."""

from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from graftlm.assembly.draft_heads import EngineHead
from graftlm.contracts import (
    AttentionBackend,
    BlockCopy,
    CacheContext,
    CompiledGrammar,
    DraftHeadContext,
    GrammarMatcher,
    ModelConfig,
    ModelContext,
    StepCopies,
)
from graftlm.execution.adapter_layers import AdapterLayers, adaptable_layers
from graftlm.execution.block_mover import BlockMover
from graftlm.execution.runner import ModelRunner
from graftlm.execution.sampler import Sampler
from graftlm.layers.low_rank import LowRankFactors
from graftlm.layers.ops import bind_ops, fused_ops
from graftlm.layers.state_ops import bind_state_ops, choose_state_ops
from graftlm.lora.adapters import LoadedAdapter
from graftlm.memory import StatePool, WindowPages, WindowSpan
from graftlm.pooling.pooling import Pooling
from graftlm.scheduling import Request, RequestGrammar
from graftlm.speculation import Speculator
from graftlm.testing.drafter import AllDrafts, ScriptedDrafter
from graftlm.testing.fake_cuda import FakeCuda
from graftlm.testing.fake_cuda_engine import FakeCudaEngine
from graftlm.testing.fake_cuda_errors import GraphRegionError, HiddenSyncError, MixedDevicesError
from graftlm.testing.fake_flashinfer import FakeFence, FakeFlashInfer
from graftlm.testing.fake_triton import fake_triton
from graftlm.testing.recording import TickingClock
from graftlm.types import FinishReason, SamplingParams
from graftlm_attention import FlashInferOptions, TritonOptions
from graftlm_attention.flashinfer_library import FlashInferLibrary
from graftlm_attention.flashinfer_paged import FlashInferAttention
from graftlm_attention.torch_paged import TorchPagedAttention
from graftlm_attention.triton_kv_write import write_kv
from graftlm_attention.triton_paged import Processors, TritonPagedAttention
from graftlm_cache.radix import RadixCache
from graftlm_cache.state_radix import StateRadixCache
from graftlm_cache.swa_radix import SWARadixCache
from graftlm_eviction.lru import LRU
from graftlm_models import provide_models
from graftlm_scheduling.fcfs import FirstComeFirstServed
from graftlm_speculation.eagle3_config import read_eagle3_config
from graftlm_speculation.eagle3_head import Eagle3Head
from graftlm_speculation.head_drafter import HeadDrafter

VOCAB = 300
PAGE_SIZE = 16
DTYPE = torch.bfloat16
ADAPTER = LoadedAdapter("a", "", 1, "digest")

#: Entries of every family's config.json.
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


class AnyToken(CompiledGrammar, GrammarMatcher):
    """A grammar that allows every token and never ends."""

    finished = False

    def matcher(self):
        return self

    def accept(self, token_id):
        return True

    def rollback(self, num_tokens):
        pass

    def fill_bitmask(self, mask, row):
        mask[row] = -1

    def forced_text(self):
        return ""

    def forced_tokens(self):
        return ()


def grammar():
    compiling = Future()
    compiling.set_result(AnyToken())

    def fill(matchers, mask):
        mask[:] = -1

    return RequestGrammar(compiling, lambda: 1e9, VOCAB, fill)


def request(request_id, prompt_len, max_tokens=4, *, params=None, first=0, **fields):
    return Request(
        request_id=request_id,
        prompt_token_ids=np.arange(first, first + prompt_len, dtype=np.int32) % VOCAB,
        params=params or SamplingParams(temperature=0.0),
        max_new_tokens=max_tokens,
        stop_token_ids=frozenset({7}),
        seed=3,
        arrival_s=0.0,
        **fields,
    )


def requests(params=None, **fields):
    """Return two requests with options and one without; the prompt of the last one needs two steps."""
    return [
        request("plain", 40, 2),
        request("asking", 3, params=params, **fields),
        request("asking again", 5, 2, params=params, first=90, **fields),
    ]


@dataclass
class Device:
    """A fake device with an engine's parts on it."""

    cuda: FakeCuda
    flashinfer: FakeFlashInfer

    def model(self, architecture="LlamaForCausalLM", has_ops=True, **config):
        raw = {**CONFIG, "architectures": [architecture], "vocab_size": VOCAB, **config}
        (provider,) = [it for it in provide_models() if architecture in it.capabilities.architectures]
        with self.cuda.blocking("rotary frequencies are copied to the device"):
            context = ModelContext(ModelConfig((architecture,), VOCAB, 512, raw=raw), self.cuda.device, DTYPE)
            model = provider.create({}, context)
        if has_ops:
            bind_ops(model, fused_ops(self.cuda.device, DTYPE, Path()))
        return model

    def attention(self, name, context):
        if name == "triton":
            return TritonPagedAttention(TritonOptions(), context, Processors(132, (9, 0)))
        if name == "torch":
            return TorchPagedAttention(context)
        fakes = self.flashinfer
        library = FlashInferLibrary(fakes.decode, fakes.prefill, fakes.cascade, write_kv)
        options = FlashInferOptions(cascade_tokens=PAGE_SIZE, workspace_mib=16)
        return FlashInferAttention(options, context, library, lambda: FakeFence(self.cuda))

    def sampler(self):
        return Sampler(FakeCudaEngine.num_rows, VOCAB, self.cuda.device, None)

    def engine(self, attention="triton", model=None, *, sampler=None, window=None, states=None, **settings):
        make_attention = partial(self.attention, attention) if isinstance(attention, str) else attention
        clock = TickingClock()

        def make_cache():
            context = CacheContext(PAGE_SIZE, LRU(), clock, window=window, states=states)
            if states is not None:
                return StateRadixCache(context, states)
            return RadixCache(context) if window is None else SWARadixCache(context, window)

        return FakeCudaEngine(
            self.cuda,
            model or self.model(),
            make_attention,
            make_cache,
            FirstComeFirstServed(),
            sampler or self.sampler(),
            dtype=DTYPE,
            page_size=PAGE_SIZE,
            window=window,
            states=states,
            **settings,
        )


@contextmanager
def fake_device():
    with FakeCuda() as cuda, fake_triton(cuda):
        yield Device(cuda, FakeFlashInfer(cuda))


@pytest.fixture
def device():
    with fake_device() as it:
        yield it


def assert_all_end(updates, reason=FinishReason.LENGTH):
    assert [(name, found[-1].finish.reason) for name, found in updates.items()] == [(name, reason) for name in updates]


SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "filters": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1, seed=5),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
    "requested logprobs": SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0, logprob_token_ids=[7, 5]),
    "edits": SamplingParams(temperature=0.0, logit_bias={1: 2.0, 9: -1.0}, min_tokens=3),
    "edits and noise": SamplingParams(temperature=0.5, logit_bias={1: 2.0}, min_tokens=2),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_never_waits(device, name):
    engine = device.engine()
    assert_all_end(engine.run(*requests(SAMPLING[name])))
    steps = [(plan.num_decodes, plan.num_prefill_tokens) for plan in engine.plans]
    assert any(prefill and not decodes for decodes, prefill in steps), "no step of a prompt alone"
    assert any(prefill and decodes for decodes, prefill in steps), "no step with both"
    assert any(decodes and not prefill for decodes, prefill in steps), "no step of one-token requests"


@pytest.mark.parametrize("name", ["filters", "edits"])
def test_a_grammar_never_waits(device, name):
    asking = requests(SAMPLING[name])
    for each in asking[1:]:
        each.grammar = grammar()
    engine = device.engine()
    assert_all_end(engine.run(*asking))
    assert any(plan.token_mask is not None for plan in engine.plans)


@pytest.mark.parametrize("attention", ["triton", "flashinfer", "torch"])
def test_an_attention_backend_never_waits(device, attention):
    shared = [request(f"shared {i}", 40 + i, 2) for i in range(2)]  # from the cache, and by FlashInfer's cascade
    engine = device.engine(attention, overlap=True)
    assert_all_end(engine.run(*requests(SAMPLING["filters"])))
    assert_all_end(engine.run(*shared))
    if attention == "flashinfer":
        assert all(device.flashinfer.num_runs.values()), device.flashinfer.num_runs


def speculator(max_drafts=3):
    """Draft the token that a readback without numbers holds, so that drafts are accepted, and others."""
    drafter = ScriptedDrafter(lambda request, num: [0] * num, ["right", "right", "partly"], VOCAB)
    return Speculator({"scripted": drafter}, max_drafts, VOCAB, AllDrafts(max_drafts))


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize(("attention", "graph_sizes"), [("triton", (1, 2, 4)), ("flashinfer", ()), ("torch", ())])
@pytest.mark.covering(strength=1)
def test_steps_with_drafts_never_wait(device, name, attention, graph_sizes):
    asking = [request(f"r{i}", 3 + i, 12, params=SAMPLING[name], first=40 * i) for i in range(3)]
    engine = device.engine(attention, speculator=speculator(), overlap=True, graph_sizes=graph_sizes)
    assert_all_end(engine.run(*asking))
    assert any(plan.num_drafts is not None for plan in engine.plans)


EAGLE3 = {
    **CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": 100,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


@pytest.mark.parametrize(
    ("attention", "graph_sizes"),
    [("triton", (1, 2, 4)), ("flashinfer", ()), pytest.param("torch", (), marks=pytest.mark.full)],
)
def test_a_draft_head_never_waits(device, attention, graph_sizes):
    model, handle = device.model(), EngineHead()
    with device.cuda.blocking("the head is created"):
        config = read_eagle3_config(EAGLE3, num_layers=2)
        served = ModelContext(ModelConfig(("LlamaForCausalLM",), VOCAB, 512, raw=CONFIG), device.cuda.device, DTYPE)
        head = Eagle3Head(config, DraftHeadContext(served, model, 2, EAGLE3))
    bind_ops(head, fused_ops(device.cuda.device, DTYPE, Path()))
    others = ScriptedDrafter(lambda request, num: [0] * num, ["right", "right", "partly"], VOCAB)
    drafters = {"head": HeadDrafter(handle, 3), "others": others}  # a head without numbers has no drafts
    speculator = Speculator(drafters, 3, VOCAB, AllDrafts(3))
    asking = [request(f"r{i}", 30 + i, 12, first=40 * i) for i in range(3)]
    engine = device.engine(
        attention, model, head=(head, handle), speculator=speculator, overlap=True, graph_sizes=graph_sizes
    )
    assert_all_end(engine.run(*asking))
    assert any(plan.num_drafts is not None for plan in engine.plans)
    assert any(plan.next_ids is not None for plan in engine.plans)


@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_steps_with_drafts_replay_the_captured_calls(device, attention):
    asking = [request(f"r{i}", 3 + i, 12, first=40 * i) for i in range(3)]
    engine = device.engine(attention, speculator=speculator(), graph_sizes=(1, 4, 12))
    assert_all_end(engine.run(*asking))
    replayed = [plan for plan in engine.plans if not plan.num_prefill_tokens]
    assert any(plan.num_drafts is not None for plan in replayed)
    assert engine.graphs.num_replays == len(replayed)


def test_drafts_under_a_grammar_never_wait(device):
    asking = requests(SAMPLING["edits"])
    for each in asking[1:]:
        each.grammar = grammar()
    engine = device.engine(speculator=speculator())
    assert_all_end(engine.run(*asking))
    assert any(plan.num_drafts is not None and plan.token_mask is not None for plan in engine.plans)


@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_graphs_replay_the_captured_calls(device, attention):
    engine = device.engine(attention, graph_sizes=(1, 2, 4), overlap=True)
    assert_all_end(engine.run(*requests(SAMPLING["filters"])))
    assert engine.graphs.num_replays >= 2


@pytest.mark.parametrize(
    ("attention", "kv_dtype"),
    [("triton", torch.int8), ("triton", torch.float8_e4m3fn), ("torch", torch.int8)],
)
def test_a_narrow_cache_never_waits(device, attention, kv_dtype):
    assert_all_end(device.engine(attention, kv_dtype=kv_dtype).run(*requests()))


@pytest.mark.parametrize(("attention", "graph_sizes"), [("triton", (4,)), ("flashinfer", (4,)), ("torch", ())])
def test_window_layers_with_their_own_memory_never_wait(device, attention, graph_sizes):
    window = WindowPages(FakeCudaEngine.num_pages, 40, WindowSpan(16, PAGE_SIZE))
    config = {"sliding_window": 16, "max_window_layers": 1, "query_pre_attn_scalar": 64}
    soft = {"attn_logit_softcapping": 8.0, "final_logit_softcapping": 6.0, "hidden_activation": "gelu_pytorch_tanh"}
    model = device.model("Gemma2ForCausalLM", **config, **soft)
    assert {layer.sliding_window for layer in model.attention_layers} == {None, 16}
    engine = device.engine(attention, model, window=window, graph_sizes=graph_sizes)
    assert_all_end(engine.run(*requests()))


STATE_MODELS = {
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "shared_intermediate_size": 48,
        "num_local_experts": 0,
    },
    "Qwen3_5ForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}


@pytest.mark.parametrize("architecture", STATE_MODELS)
def test_recurrent_states_never_wait(device, architecture):
    states = StatePool(FakeCudaEngine.num_rows, 4, FakeCudaEngine.num_pages)
    model = device.model(architecture, **STATE_MODELS[architecture])
    bind_state_ops(model, choose_state_ops(device.cuda.device, Path()))
    engine = device.engine("triton", model, states=states)
    assert_all_end(engine.run(*requests(SAMPLING["filters"])))
    assert_all_end(engine.run(request("again", 40, 2)))
    assert all(plan.state is not None for plan in engine.plans)


def llama_weights():
    """Yield the weights of a Llama checkpoint."""
    hidden, inner, heads, kv_heads = 64, 96, 4 * 64, 2 * 64
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.down_proj": (hidden, inner),
    }
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv_heads, hidden))
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", torch.zeros(shape)
    yield "model.norm.weight", torch.zeros(hidden)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, torch.zeros(VOCAB, hidden)


def test_adapters_never_wait(device):
    model = device.model()
    with device.cuda.blocking("weights and an adapter are loaded"):
        model.load_weights(llama_weights())
        model.pack_weights()
        layers = adaptable_layers(model)
        adapters = AdapterLayers(layers, num_slots=2, max_rank=4)
        factors = {
            f"{layer.prefix}{name}": LowRankFactors(torch.zeros(2, layer.in_features), torch.zeros(size, 2))
            for layer in layers
            for name, size in layer.parts.items()
        }
        adapters.set(1, factors)
    engine = device.engine("triton", model, adapters=adapters, graph_sizes=(4,))
    assert_all_end(engine.run(*requests(adapter=ADAPTER)))
    assert any(plan.adapter_slots is not None for plan in engine.plans)


@pytest.mark.parametrize(
    "pooling", [Pooling("last"), Pooling("mean"), Pooling("labels", (5, 6))], ids=lambda it: it.way
)
def test_pooling_never_waits(device, pooling):
    asking = [request(f"r{i}", 10 + 20 * i, 0, first=60 * i, pooling=pooling) for i in range(3)]
    updates = device.engine().run(*asking)
    assert_all_end(updates, FinishReason.STOP)
    assert all(found[-1].embedding is not None for found in updates.values())


def test_a_score_head_never_waits(device):
    model = device.model("LlamaForSequenceClassification", num_labels=3, id2label={"0": "a", "1": "b", "2": "c"})
    asking = [request(f"r{i}", 10 + 20 * i, 0, pooling=Pooling("scores")) for i in range(2)]
    assert_all_end(device.engine("triton", model).run(*asking), FinishReason.STOP)


@pytest.mark.parametrize("has_ops", [True, False])
def test_experts_never_wait(device, has_ops):
    model = device.model("Qwen3MoeForCausalLM", has_ops, **EXPERTS)
    assert_all_end(device.engine("triton", model, graph_sizes=(4,)).run(*requests()))


def test_copies_of_blocks_never_wait_for_tensors(device):
    """Of all launches, only a step with copies of blocks may wait for its stream at its end."""
    kv = device.engine().kv
    mover = BlockMover(kv, device.cuda.device, device.cuda.streams)
    mover.allocate(num_blocks=4, pages_per_block=2)
    pages = np.arange(2, dtype=np.int32)
    store, load = (BlockCopy(slot, 0, pages) for slot in (1, 2))
    with torch.inference_mode():
        mover.copy(StepCopies(early_stores=(store,), early_loads=(load,), loads=(load,), stores=(store,)))


CPU_INDEX, ITEM = "an index of the CPU", ".item()"
FAULTS = {
    CPU_INDEX: (MixedDevicesError, lambda tensor: tensor.index_select(0, torch.zeros(1, dtype=torch.int64))),
    ITEM: (HiddenSyncError, lambda tensor: tensor.sum().item()),
}


class FaultyRunner(ModelRunner):
    """A runner with a fault that is applied to the latest tokens."""

    fault = staticmethod(lambda tensor: None)

    def _launch(self, plan):
        self.fault(self._last_tokens)
        return super()._launch(plan)


class FaultySampler(Sampler):
    """A sampler with a fault that is applied to the logits."""

    fault = staticmethod(lambda tensor: None)

    def sample(self, logits, *arguments):
        self.fault(logits)
        return super().sample(logits, *arguments)


class FaultyAttention(AttentionBackend):
    """A backend with a fault that is applied to the context lengths once per step, or to the queries of a layer."""

    def __init__(self, backend, in_prepare=lambda tensor: None, in_forward=lambda tensor: None):
        self._backend, self._in_prepare, self._in_forward = backend, in_prepare, in_forward

    def prepare(self, batch):
        self._in_prepare(batch.seq_lens)
        self._backend.prepare(batch)

    def forward(self, q, k, v, layer):
        self._in_forward(q)
        return self._backend.forward(q, k, v, layer)


def faulty_engine(device, place, fault):
    if place == "runner":
        return device.engine(make_runner=type("Faulty", (FaultyRunner,), {"fault": staticmethod(fault)}))
    if place == "sampler":
        faulty = type("Faulty", (FaultySampler,), {"fault": staticmethod(fault)})
        return device.engine(sampler=faulty(FakeCudaEngine.num_rows, VOCAB, device.cuda.device, None))
    name, _, method = place.partition(".")

    def make_attention(context):
        return FaultyAttention(device.attention(name, context), **{f"in_{method}": fault})

    return device.engine(make_attention)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["runner", "sampler", "triton.prepare", "triton.forward", "flashinfer.forward"])
def test_a_fault_fails_the_step(place, fault):
    error, run = FAULTS[fault]
    with pytest.raises(error), fake_device() as device:
        faulty_engine(device, place, run).run(request("r", 5))


def test_a_fault_whose_exception_is_caught_still_fails_the_test():
    def handled(tensor):
        with suppress(Exception):
            tensor.view(-1)[0].item()

    with pytest.raises(HiddenSyncError), fake_device() as device:
        assert_all_end(faulty_engine(device, "sampler", handled).run(request("r", 5)))


class OtherEachStep(FaultyAttention):
    """A backend whose layers launch other kernels in each step, which a graph cannot repeat."""

    def __init__(self, backend, change):
        super().__init__(backend, self.prepare_change, self.forward_change)
        self.change, self.lens, self.num_steps = change, None, 0

    def prepare_change(self, seq_lens):
        self.lens, self.num_steps = seq_lens.clone(), self.num_steps + 1

    def forward_change(self, q):
        self.change(self, q)


@pytest.mark.parametrize(
    "change",
    [
        lambda self, q: self.lens.add_(1),
        lambda self, q: q.mul(self.num_steps),
        lambda self, q: q.new_empty(self.num_steps),
        lambda self, q: [q.neg() for _ in range(self.num_steps)],
        lambda self, q: torch.zeros(1).pin_memory().to(q.device, non_blocking=True),
    ],
    ids=["a tensor of this step", "a number of this step", "a size of this step", "more launches", "a copy"],
)
def test_a_step_that_a_graph_cannot_repeat_fails(change):
    def run(device):
        def make(context):
            return OtherEachStep(device.attention("triton", context), change)

        device.engine(make, graph_sizes=(2,)).run(request("r", 5))

    with pytest.raises(GraphRegionError), fake_device() as device:
        run(device)
