"""The Triton backend: in the interpreter on any machine, compiled on a GPU.

As a program, in an environment with TRITON_INTERPRET=1, this module runs the cases that the interpreter supports.
"""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from graftlm import Engine, SamplingParams
from graftlm.contracts import AttentionCapabilities, AttentionLayer
from graftlm.execution.kv_store import KVStore
from graftlm.testing import run_conformance
from graftlm.testing.attention import AttentionBackendConformance
from graftlm.testing.attention_scene import AttentionScene, LayerInputs
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.reference_attention import ReferenceAttention
from graftlm_attention import TritonOptions

pytest.importorskip("triton")

from graftlm_attention.triton_paged import TritonPagedAttention

LAYER = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
MIXED = [(140, 1), (0, 1), (3, 9), (0, 20)]


class KitOfTriton(AttentionBackendConformance):
    """The conformance kit with the default options of a YAML file."""

    def create(self, context):
        return TritonPagedAttention(TritonOptions(), context)


class InterpretedKit(KitOfTriton):
    """The part of the kit that the interpreter, 1,000 times slower than a GPU, runs in seconds."""

    # fp8 has its own test, because the interpreter rounds it differently
    capabilities = AttentionCapabilities(dtypes=("float32",), sinks=True, kv_dtypes=("int8",))
    parameters: ClassVar = {
        "page_size": (16,),
        "dtype": ("float32",),
        "head_dim": (80,),
        "group": (3,),
        "window": (7, 40),
        "seed": (1,),
    }


def draw(device, requests=MIXED, layer=LAYER, page_size=4, seed=0):
    return AttentionScene.draw(
        requests, [layer], page_size=page_size, dtype=torch.float32, device=torch.device(device), seed=seed
    )


def run(scene, options=None):
    return scene.run(lambda context: TritonPagedAttention(options or TritonOptions(), context)).outputs[0]


def check(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def pages_of_any_size(device):
    layer = replace(LAYER, num_heads=7, num_kv_heads=1, sliding_window=50, soft_cap=4.0)
    for page_size, one in ((1, layer), (24, layer), (64, LAYER)):
        scene = draw(device, layer=one, page_size=page_size)
        turned = replace(scene.batch, page_table=scene.batch.page_table.T.contiguous().T)  # also of any layout
        check(run(replace(scene, batch=turned)), scene.run(ReferenceAttention).outputs[0])


def pieces_of_fixed_length_make_a_request_independent_of_its_batch(device):
    scene, options = draw(device, [(300, 1), (130, 1), (5, 1)]), TritonOptions(split_tokens=128)
    together = run(scene, options)
    for b in range(3):
        check(run(scene.alone(b), options), together[b : b + 1], 0)


def rows_that_pad_a_batch_give_zeros(device):
    for layer in (LAYER, replace(LAYER, sliding_window=130)):
        scene = draw(device, [(140, 1), (0, 1)], layer)
        expected = run(scene)
        expected[1] = 0
        padded = replace(scene.batch, seq_lens=scene.batch.seq_lens * torch.tensor([1, 0], device=device))
        check(run(replace(scene, batch=padded)), expected, 0)


def a_cache_of_fp8_holds_what_it_can(device):
    scene = draw(device)
    q, k, v = scene.inputs[0]
    if device == "cpu":  # the interpreter rounds differently, and its fp8 has no NaN
        k, v = (tensor.to(torch.float8_e4m3fn).float() for tensor in (k, v))
    else:
        v[3, 1, 0] = torch.nan  # this must not be read as a number
    k[-1, 0, :2] = torch.tensor([1000.0, -1000.0])  # the largest number of the type is 448
    narrow, wide = (_cache_like(scene, dtype) for dtype in (torch.float8_e4m3fn, torch.float32))
    rounded = LayerInputs(q, *(tensor.clamp(-448, 448).to(torch.float8_e4m3fn).float() for tensor in (k, v)))

    backend = TritonPagedAttention(TritonOptions(), replace(scene.context, kv=narrow))
    backend.prepare(scene.batch)
    out = backend.forward(q, k, v, LAYER)
    expected = replace(scene, store=wide, inputs=(rounded,)).run(ReferenceAttention)
    torch.testing.assert_close(out, expected.outputs[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    for ours, theirs in zip(caches(narrow), caches(expected.store), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0, equal_nan=True)


def _cache_like(scene, dtype):
    """Return the scene's cache with numbers rounded to fp8, in another dtype."""
    store = KVStore([LAYER], scene.store.num_pages, scene.store.page_size, dtype, scene.store.device)
    for old, new in zip(caches(scene.store), caches(store), strict=True):
        new.copy_(old.to(torch.float8_e4m3fn).to(dtype))
    return store


def caches(store):
    return store.keys(0), store.values(0)


def sinks_take_their_part_of_the_softmax_once(device):
    layer = replace(LAYER, sinks=torch.tensor([0.5, -2.0, 3.0, 0.0], device=device))
    scene = draw(device, layer=layer)
    for options in (TritonOptions(), TritonOptions(split_tokens=128)):  # this cuts the longest context into two pieces
        check(run(scene, options), scene.run(ReferenceAttention).outputs[0])


CASES = {
    case.__name__: case
    for case in (
        pages_of_any_size,
        pieces_of_fixed_length_make_a_request_independent_of_its_batch,
        rows_that_pad_a_batch_give_zeros,
        a_cache_of_fp8_holds_what_it_can,
        sinks_take_their_part_of_the_softmax_once,
    )
}


def run_interpreted():
    """Run everything on the CPU; return the failures by name."""
    results = run_conformance(InterpretedKit)
    failures = {result.name: repr(result.error) for result in results if result.error is not None}
    for name, case in CASES.items():
        try:
            case("cpu")
        except Exception as error:  # reported to the test that waits for this process
            failures[name] = repr(error)
    return failures


def generate(path, prompts, max_tokens, graphs):
    engine = Engine(
        model={"path": path, "dtype": "float32", "device": "cpu"},
        attention={"name": "triton"},
        cache={"name": "radix", "page_size": 4},
        scheduling={"prefill_tokens_per_step": 24},
        memory={"kv_tokens": 512},
        execution={"graphs": graphs, "graph_batch_sizes": [4]},
    )
    with engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
        return [list(output.token_ids) for output in outputs]


needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

#: The second model has windows of 16 tokens, which the kit also tests in the quick set.
MODELS = ("llama", "mistral")
PROMPT_LENS = (3, 21, 40)
MAX_TOKENS = 4


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(1, 300, length).tolist() for length in PROMPT_LENS]


@pytest.fixture(scope="module")
def interpreted(request, checkpoint, prompts):
    """Results of one process in which Triton interprets its kernels: `failures` and `answers`.

    In the quick set, there are only the answers of the first model, without padding.
    """
    full = any(item.get_closest_marker("full") for item in request.session.items)
    models = {name: str(checkpoint(name)) for name in (MODELS if full else MODELS[:1])}
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(
        [*command, json.dumps([models, prompts, MAX_TOKENS, full])],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_interpreted_kernels_keep_the_contract(interpreted):
    assert interpreted["failures"] == {}


@pytest.mark.parametrize("model", [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.full)])
def test_an_engine_with_interpreted_kernels_generates_transformers_greedy_tokens(
    interpreted, checkpoint, prompts, model
):
    oracle = HuggingFaceModel(checkpoint(model))
    assert interpreted["answers"][model] == [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]


@pytest.mark.full
def test_padding_as_for_graphs_does_not_change_tokens(interpreted):
    assert interpreted["answers"]["padded"] == interpreted["answers"][MODELS[0]]


@pytest.mark.gpu
@needs_device
class TestOnADevice(KitOfTriton):
    device = "cuda"
    capabilities = AttentionCapabilities(
        dtypes=("float32", "bfloat16", "float16"), sinks=True, kv_dtypes=("int8", "fp8")
    )
    parameters: ClassVar = {
        **KitOfTriton.parameters,
        "page_size": (1, 16, 64),
        "dtype": ("float32", "bfloat16", "float16"),
        "head_dim": (16, 64, 80, 128, 256),
    }


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("name", CASES)
def test_the_case_passes_on_a_gpu(name):
    CASES[name]("cuda")


@pytest.mark.gpu
@needs_device
def test_a_captured_batch_can_be_replayed_with_other_lengths():
    scene = draw("cuda", [(1300, 1), (20, 1), (600, 1)])
    backend = TritonPagedAttention(TritonOptions(), scene.context)
    backend.prepare(scene.batch)
    backend.forward(*scene.inputs[0], LAYER)  # compiles, which is not possible during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(*scene.inputs[0], LAYER)
    scene.batch.seq_lens.copy_(torch.tensor([150, 0, 600]))
    graph.replay()
    backend.prepare(scene.batch)
    check(out, backend.forward(*scene.inputs[0], LAYER), 0)
    assert out[1].count_nonzero() == 0
    assert out[0].isfinite().all()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's warnings about the NaN that some tests use
    models, prompts, max_tokens, has_padded = json.loads(sys.argv[1])
    answers = {name: generate(path, prompts, max_tokens, graphs=False) for name, path in models.items()}
    if has_padded:
        answers["padded"] = generate(models[MODELS[0]], prompts, max_tokens, graphs=True)
    json.dump({"failures": run_interpreted(), "answers": answers}, sys.stdout)
