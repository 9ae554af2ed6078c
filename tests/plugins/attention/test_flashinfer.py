"""The FlashInfer backend: with wrappers in plain PyTorch on any machine, with FlashInfer's own wrappers on a GPU.

The doubles have the arguments of FlashInfer's wrappers, and compute attention only from the arrays that they were
planned with. The results therefore show whether the arrays are right.
"""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from graftlm import EngineConfig, SamplingParams, hookimpl
from graftlm.assembly.assemble import assemble
from graftlm.contracts import AttentionCapabilities, AttentionLayer, Platform, Provider
from graftlm.errors import InvariantError, ProviderUnavailableError
from graftlm.execution.decode_inputs import DecodeInputs, DecodeShape
from graftlm.execution.kv_store import KVStore
from graftlm.registry import Registry
from graftlm.testing.attention import AttentionBackendConformance
from graftlm.testing.attention_scene import AttentionScene
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.reference_attention import ReferenceAttention
from graftlm_attention import FlashInferOptions
from graftlm_attention.flashinfer_library import FlashInferLibrary, load_flashinfer
from graftlm_attention.flashinfer_paged import FlashInferAttention
from graftlm_attention.flashinfer_planner import LayerKind, LayerPlanner

CPU = torch.device("cpu")
LAYER = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


class PrefillDouble:
    """Replaces BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
        num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        self.arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.mask = causal, window_left, logits_soft_cap
        self.scale, self.dtypes = sm_scale, (q_data_type, kv_data_type)

    def run(self, q, paged_kv_cache, out=None):
        found, _ = self.attend(q, *paged_kv_cache)
        return found if out is None else out.copy_(found)

    def attend(self, q, keys, values):
        """Return [n, H, D], and the logarithm of the sum of each softmax, [n, H]."""
        num_heads, num_kv_heads, head_dim, page_size = self.shape
        assert keys.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert q.shape[1:] == (num_heads, head_dim)
        assert self.dtypes == (q.dtype, keys.dtype)
        qo_indptr, indptr, indices, last_page_len = (array.tolist() for array in self.arrays)
        assert len(q) == qo_indptr[-1]
        outs, sums = [], []
        for i, last in enumerate(last_page_len):
            pages = torch.tensor(indices[indptr[i] : indptr[i + 1]])
            assert 1 <= last <= page_size
            kv_len = (len(pages) - 1) * page_size + last
            k, v = (cache[pages].flatten(0, 1)[:kv_len] for cache in (keys, values))
            out, lse = self.one(q[qo_indptr[i] : qo_indptr[i + 1]], k, v)
            outs.append(out)
            sums.append(lse)
        return torch.cat(outs), torch.cat(sums)

    def one(self, q, k, v):
        causal, window_left, soft_cap = self.mask
        at = torch.arange(len(q))[:, None] + len(k) - len(q)
        behind = at - torch.arange(len(k))
        seen = (behind >= 0) | torch.tensor(not causal)
        if window_left >= 0:
            seen &= behind <= window_left
        k, v = (torch.where(seen.any(0)[:, None, None], x, 0.0) for x in (k, v))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * self.scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(2), v.repeat_interleave(group, 1))
        return out, scores.logsumexp(2).T


class DecodeDouble(PrefillDouble):
    """Replaces BatchDecodeWithPagedKVCacheWrapper; with graph buffers, it reads only these."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert use_cuda_graph == all(buffer is not None for buffer in self.buffers)
        self.use_cuda_graph = use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.plan_buffer = int_workspace_buffer

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        arrays = indptr, indices, last_page_len
        if self.use_cuda_graph:
            assert len(last_page_len) == len(self.buffers[2])
            for buffer, array in zip(self.buffers, arrays, strict=True):
                buffer[: len(array)].copy_(array)
            arrays = self.buffers
        super().plan(
            torch.arange(len(last_page_len) + 1), *arrays, num_qo_heads, num_kv_heads, head_dim, page_size,
            causal=True, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip


class CascadeDouble:
    """Replaces MultiLevelCascadeAttentionWrapper."""

    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD"):
        self.levels = [PrefillDouble(float_workspace_buffer, kv_layout) for _ in range(num_levels)]

    def plan(
        self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, *shape,
        causal=False, **settings,
    ):  # fmt: skip
        arrays = zip(qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True)
        for i, (level, each) in enumerate(zip(self.levels, arrays, strict=True)):
            level.plan(*each, *shape, causal=causal and i == len(self.levels) - 1, **settings)

    def run(self, q, paged_kv_cache):
        outs, sums = zip(*[level.attend(q, *paged_kv_cache) for level in self.levels], strict=True)
        shares = torch.stack(sums).softmax(0)
        return (torch.stack(outs) * shares[..., None]).sum(0)


class Recorder:
    """Creates doubles and records them: `made` by role, `planned` in order."""

    def __init__(self):
        self.made, self.planned = [], []

    @property
    def library(self):
        def write_kv(k, v, keys, values, out_slots):
            keys.write(out_slots, k)
            values.write(out_slots, v)

        makers = {"decode": DecodeDouble, "prefill": PrefillDouble, "cascade": CascadeDouble}
        return FlashInferLibrary(
            **{role: self.recording(role, make) for role, make in makers.items()}, write_kv=write_kv
        )

    def recording(self, role, make):
        def create(*arguments, **settings):
            wrapper = make(*arguments, **settings)
            plan = wrapper.plan

            def recorded(*arrays, **settings):
                self.planned.append(role)
                plan(*arrays, **settings)

            wrapper.plan = recorded
            self.made.append((role, wrapper))
            return wrapper

        return create


def backend(context, recorder=None, **options):
    settings = FlashInferOptions(**{"cascade_tokens": 16, "workspace_mib": 16, **options})
    return FlashInferAttention(settings, context, (recorder or Recorder()).library)


class TestTheContract(AttentionBackendConformance):
    capabilities = AttentionCapabilities(page_sizes=(1, 16))
    parameters: ClassVar = {
        "page_size": (1, 16),
        "dtype": ("float32",),
        "head_dim": (16,),
        "group": (3, 8),
        "window": (1, 16, 39),
        "seed": (0, 1),
    }

    def create(self, context):
        return backend(context)


def draw(requests, layers=(LAYER,), page_size=16, shared=0):
    """Draw a scene in which the first `shared` pages of all requests are the same."""
    tables, next_page = [], shared
    for past, new in requests:
        own = -(-(past + new) // page_size) - shared
        tables.append([*range(shared), *range(next_page, next_page + own)])
        next_page += own
    return AttentionScene.draw(
        requests, layers, page_size=page_size, dtype=torch.float32, device=CPU, page_tables=tables
    )


WINDOWED = replace(LAYER, sliding_window=20)


@pytest.mark.parametrize(
    ("requests", "layer", "shared", "options", "roles"),
    [
        ([(30, 1), (5, 1)], LAYER, 0, {}, ["decode"]),
        ([(0, 20), (40, 3)], LAYER, 0, {}, ["prefill"]),
        ([(30, 1), (5, 1), (0, 20)], LAYER, 0, {}, ["decode", "prefill"]),
        ([(70, 1), (64, 1)], LAYER, 4, {}, ["cascade"]),
        ([(70, 1), (66, 1), (64, 20)], LAYER, 4, {}, ["cascade"]),
        ([(70, 1), (64, 1)], LAYER, 4, {"cascade_tokens": 64}, ["cascade"]),
        ([(70, 1), (64, 1)], LAYER, 4, {"cascade_tokens": 65}, ["decode"]),
        ([(70, 1), (64, 1)], LAYER, 4, {"cascade_tokens": None}, ["decode"]),
        ([(70, 1), (64, 1)], WINDOWED, 4, {}, ["decode"]),
        ([(70, 1)], LAYER, 4, {}, ["decode"]),
    ],
)
def test_a_step_uses_the_wrappers_that_fit_its_requests(requests, layer, shared, options, roles):
    scene, recorder = draw(requests, [layer], shared=shared), Recorder()
    outcome = scene.run(lambda context: backend(context, recorder, **options))
    torch.testing.assert_close(outcome.outputs, scene.run(ReferenceAttention).outputs, rtol=1e-5, atol=1e-5)
    assert recorder.planned == roles


def test_layers_of_the_same_kind_share_a_plan():
    layers = [LAYER, replace(WINDOWED, layer_id=1), replace(LAYER, layer_id=2), replace(WINDOWED, layer_id=3)]
    scene, recorder = draw([(30, 1), (40, 9)], layers), Recorder()
    outcome = scene.run(lambda context: backend(context, recorder))
    torch.testing.assert_close(outcome.outputs, scene.run(ReferenceAttention).outputs, rtol=1e-5, atol=1e-5)
    assert recorder.planned == ["decode", "prefill"] * 2


@pytest.mark.parametrize(("num_heads", "expected"), [(2, False), (6, False), (8, True), (14, True)])
def test_large_groups_of_heads_decode_on_tensor_cores(num_heads, expected):
    scene, recorder = draw([(3, 1)], [replace(LAYER, num_heads=num_heads)]), Recorder()
    scene.run(lambda context: backend(context, recorder))
    ((_, wrapper),) = recorder.made
    assert wrapper.use_tensor_cores is expected


def test_a_plan_buffer_is_not_overwritten_before_the_last_plan_is_copied():
    events = []
    fence = SimpleNamespace(wait=lambda: events.append("wait"), record=lambda: events.append("record"))
    scene, recorder = draw([(30, 1), (5, 1)]), Recorder()
    options = FlashInferOptions()
    planner = LayerPlanner(
        LayerKind.of(LAYER), recorder.library, torch.zeros(1), 16, torch.float32, options, lambda: fence
    )
    for _ in range(2):
        planner.plan(scene.batch)
        events += recorder.planned[-1:]
    assert events == ["wait", "record", "decode"] * 2


def graph_batches(size, lens_of_steps, page_size=16, max_pages=8):
    """Yield batches in the form of graphs: all in the same tensors."""
    inputs = DecodeInputs(DecodeShape(8, 8, max_pages, page_size, (99,)), CPU)
    padded = inputs.fill(None, size)
    for lens in lens_of_steps:
        batch = padded
        tables = np.stack([np.arange(i * max_pages, (i + 1) * max_pages, dtype=np.int32) for i in range(size)])
        batch.page_table[:, :] = torch.from_numpy(tables)
        batch.seq_lens[:] = torch.tensor(lens)
        batch.positions[:] = torch.tensor(lens) - 1
        batch.out_slots[:] = torch.tensor([i * max_pages * page_size + n - 1 for i, n in enumerate(lens)])
        yield replace(batch, seq_lens_cpu=np.array(lens, dtype=np.int32), page_table_cpu=tables)


def test_a_graph_reads_each_step_from_the_captured_buffers():
    store = KVStore([LAYER], 100, 16, torch.float32, CPU)
    store.keys(0).normal_(), store.values(0).normal_()
    context = replace(draw([(3, 1)]).context, kv=store, max_requests=8, max_context_len=128)
    recorder = Recorder()
    tested, reference = backend(context, recorder), ReferenceAttention(context)
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    batches = graph_batches(3, [[1, 1, 1], [40, 7, 128], [16, 17, 90]])
    tested.prepare(next(batches))
    ((_, captured),) = recorder.made
    for batch in batches:
        tested.prepare(batch)
        reference.prepare(batch)
        expected = reference.forward(q, k, v, LAYER)
        out = captured.run(q, (store.keys(0), store.values(0)))
        torch.testing.assert_close(out.flatten(1), expected, rtol=1e-5, atol=1e-5)
    assert [role for role, _ in recorder.made] == ["decode"]


def test_graphs_of_all_sizes_share_their_memory():
    recorder = Recorder()
    tested = backend(draw([(3, 1)]).context, recorder)
    for size in (8, 4, 1, 4):
        (batch,) = graph_batches(size, [[5] * size])
        tested.prepare(batch)
    wrappers = [wrapper for _, wrapper in recorder.made]
    assert [len(wrapper.buffers[2]) for wrapper in wrappers] == [8, 4, 1]
    assert len({wrapper.buffers[1].data_ptr() for wrapper in wrappers}) == 1
    assert len({wrapper.plan_buffer.data_ptr() for wrapper in wrappers}) == 1
    assert wrappers[0].buffers[1].numel() == 8 * 8


def test_a_cache_of_another_dtype_is_refused():
    context = draw([(3, 1)]).context
    narrow = KVStore([LAYER], 4, 16, torch.bfloat16, CPU)
    with pytest.raises(
        ProviderUnavailableError, match=r"supports only a KV cache of the model's dtype, torch\.float32"
    ):
        backend(replace(context, kv=narrow))


@pytest.mark.parametrize("special", [{"sinks": torch.zeros(4)}, {"value_prefix_dim": 8}])
def test_unsupported_layers_are_refused(special):
    context = draw([(3, 1)]).context
    with pytest.raises(
        ProviderUnavailableError, match="neither attention sinks nor latent attention, which layer 0 needs"
    ):
        backend(replace(context, layers=[replace(LAYER, **special)]))


def test_forward_needs_a_prepared_batch_and_matching_shapes():
    scene = draw([(3, 1)])
    tested, (inputs,) = backend(scene.context), scene.inputs
    with pytest.raises(InvariantError, match="before prepare"):
        tested.forward(*inputs, LAYER)
    tested.prepare(scene.batch)
    with pytest.raises(InvariantError, match=r"layer 0 expects q \(1, 4, 16\)"):
        tested.forward(inputs.q[:, :2], inputs.k, inputs.v, LAYER)


class DoublePlugin:
    """Offers the backend with doubles."""

    def __init__(self, recorder):
        self.recorder = recorder

    @hookimpl
    def provide_attention_backends(self):
        return [
            Provider(
                name="flashinfer_double",
                summary="FlashInfer's interface in PyTorch",
                api_version=1,
                create=lambda options, context: FlashInferAttention(options, context, self.recorder.library),
                options=FlashInferOptions,
                capabilities=AttentionCapabilities(page_sizes=(1, 16), cascade=True, graph=True),
            )
        ]


@pytest.mark.parametrize(
    ("model", "page_size", "graphs", "roles"),
    [("llama", 16, True, {"decode", "prefill", "cascade"}), ("gemma2", 1, False, {"decode", "prefill", "cascade"})],
)
def test_an_engine_generates_transformers_greedy_tokens(checkpoint, model, page_size, graphs, roles):
    rng, recorder = np.random.default_rng(3), Recorder()
    shared = rng.integers(1, 300, 20).tolist()
    prompts = [shared + rng.integers(1, 300, n).tolist() for n in (3, 9, 17)]
    settings = EngineConfig.load(
        {
            "model": {"path": str(checkpoint(model)), "dtype": "float32", "device": "cpu"},
            "attention": {"name": "flashinfer_double", "options": {"cascade_tokens": 16, "workspace_mib": 16}},
            "cache": {"page_size": page_size},
            "memory": {"kv_tokens": 512},
            "execution": {"graphs": graphs, "graph_batch_sizes": [2, 4]},
        }
    )
    parts = assemble(settings, Registry.load(settings.plugins, (DoublePlugin(recorder),)), Platform("cpu"))
    params, tokens = SamplingParams(temperature=0, max_tokens=4), {}
    for i, prompt in enumerate(prompts):
        parts.loop.scheduler.add(parts.intake.request(str(i), parts.intake.check_prompt(prompt), params))
        if i == 0:
            tokens["0"] = [token for update in parts.loop.step() for token in update.token_ids]
    while parts.loop.scheduler.has_work:
        for update in parts.loop.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
    parts.loop.close()
    oracle = HuggingFaceModel(checkpoint(model))
    assert [tokens[str(i)] for i in range(3)] == [oracle.generate(prompt, 4) for prompt in prompts]
    assert set(recorder.planned) == roles


needs_flashinfer = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
    reason="needs a CUDA device and the package flashinfer-python",
)


@pytest.mark.gpu
@needs_flashinfer
class TestOnADevice(AttentionBackendConformance):
    device = "cuda"
    capabilities = AttentionCapabilities(dtypes=("bfloat16", "float16"), head_dims=(64, 128, 256), page_sizes=(1, 16))
    parameters: ClassVar = {
        **AttentionBackendConformance.parameters,
        "page_size": (1, 16),
        "dtype": ("bfloat16", "float16"),
        "head_dim": (64, 128, 256),
    }

    def create(self, context):
        return FlashInferAttention(FlashInferOptions(cascade_tokens=16), context, load_flashinfer())

    def scene(self, requests, *layers, dtype="bfloat16", **settings):
        """Draw the kit's scene with a dtype and a head size that FlashInfer supports."""
        layers = [replace(layer, head_dim=max(64, layer.head_dim)) for layer in layers or (LAYER,)]
        return super().scene(requests, *layers, dtype=dtype.replace("float32", "bfloat16"), **settings)


@pytest.mark.gpu
@needs_flashinfer
@pytest.mark.parametrize("num_heads", [4, 16])
def test_a_captured_batch_can_be_replayed_with_other_lengths(num_heads):
    device = torch.device("cuda")
    layer = AttentionLayer(0, num_heads=num_heads, num_kv_heads=2, head_dim=64, scale=0.125)
    scene = AttentionScene.draw(
        [(1300, 1), (20, 1), (600, 1)], [layer], page_size=16, dtype=torch.bfloat16, device=device
    )
    tested = FlashInferAttention(FlashInferOptions(), scene.context, load_flashinfer())
    batch = replace(scene.batch, in_graph=True)
    tested.prepare(batch)
    tested.forward(*scene.inputs[0], layer)  # compiles, which is not possible during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tested.forward(*scene.inputs[0], layer)
    lens = np.array([150, 21, 601], dtype=np.int32)
    batch.seq_lens.copy_(torch.from_numpy(lens))
    changed = replace(batch, seq_lens_cpu=lens)
    tested.prepare(changed)
    graph.replay()
    eager = FlashInferAttention(FlashInferOptions(), scene.context, load_flashinfer())
    eager.prepare(replace(changed, in_graph=False))
    torch.testing.assert_close(out, eager.forward(*scene.inputs[0], layer), rtol=2e-2, atol=2e-2)
